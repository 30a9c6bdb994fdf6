"""Attempts as Ray actors: fresh processes, death, waiting, logs, reports."""

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store import open_store
from pipeline.errors import FailureClass
from pipeline.execution.backend import Attempt, WorkOutcome, WorkRequest
from pipeline.stages.parameters import PythonCallParameters
from pipeline.stages.protocol import Resources
from pipeline.stages.registry import Framework

pytestmark = pytest.mark.ray

MODULE = """
    import os, sys, time
    from pipeline.stages.protocol import StageResult

    def use_torch(context):
        import torch
        return done(context, torch=torch.ones(2).sum().item())

    def use_jax(context):
        import jax.numpy as jnp
        return done(context, jax=float(jnp.ones(2).sum()))

    def use_both(context):
        import torch, jax
        return done(context)

    def say(context):
        print("hello from the stage")
        sys.stderr.write("and a word of warning\\n")
        context.reporter.note("noted")
        return done(context)

    def sleep(context):
        context.reporter.note(str(os.getpid()))
        time.sleep(60)

    def done(context, **metrics):
        (context.output("value") / "pid").write_text(str(os.getpid()))
        loaded = [name for name in ("torch", "jax") if name in sys.modules]
        return StageResult(metrics={"pid": os.getpid(), **metrics}, facts={"loaded": loaded})
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray-backend")
    (root / "ray_stages.py").write_text(textwrap.dedent(MODULE))
    return root


@pytest.fixture(scope="module")
def backend(ray_head: str) -> Iterator[Any]:
    from pipeline.execution.ray_backend import RayBackend

    backend = RayBackend(address=ray_head, verbose=False)
    yield backend
    backend.close()


def make_request(
    project: Path, function: str, *, framework: Framework = Framework.NONE, cpus: float = 0.5
) -> WorkRequest:
    name = f"{function}-{time.time_ns()}"
    resources = Resources(cpus=cpus, gpus=0.0)
    return WorkRequest(
        kind="python.call",
        run=f"ray_stages:{function}",
        framework=framework,
        store_url=str(project / "store"),
        run_id="run",
        flow="flow",
        stage=name,
        attempt=1,
        fingerprint=name,
        parameters=PythonCallParameters(call=f"ray_stages:{function}", outputs=["value"]),
        inputs={},
        output_types={"value": "files"},
        attempt_key=f"artifacts/{name}/run-1",
        workspace_key=f"workspaces/{name}",
        log_key=f"runs/run/stages/{name}/1/output.log",
        project_root=str(project),
        resources=resources,
        actor_resources=resources,
        deadline=None,
        ephemeral=True,
    )


def wait(attempt: Attempt, *, seconds: float = 60) -> WorkOutcome:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        outcome = attempt.poll()
        if outcome is not None:
            return outcome
        time.sleep(0.05)
    raise AssertionError(f"no outcome; {attempt.state()}")


def wait_for_note(attempt: Attempt) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert attempt.poll() is None
        for report in attempt.drain():
            if report.kind == "note":
                return str(report.payload["text"])
        time.sleep(0.05)
    raise AssertionError("no note")


def test_each_attempt_has_a_process_of_its_own_with_its_framework_only(project, backend) -> None:
    outcomes = []
    for function, framework in (("use_torch", Framework.TORCH), ("use_jax", Framework.JAX)):
        attempt = backend.start(make_request(project, function, framework=framework))
        outcomes.append(wait(attempt))
        attempt.end()
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert [outcome.facts["loaded"] for outcome in outcomes] == [["torch"], ["jax"]]
    assert outcomes[0].metrics["pid"] != outcomes[1].metrics["pid"]


def test_both_frameworks_in_one_process_are_refused(project, backend) -> None:
    outcome = wait(backend.start(make_request(project, "use_both", framework=Framework.TORCH)))
    assert outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.USER
    assert "has loaded jax; its kind declares 'torch'" in outcome.failure.message


def test_what_a_stage_prints_and_notes_is_kept(project, backend) -> None:
    request = make_request(project, "say")
    attempt = backend.start(request)
    assert wait(attempt).failure is None
    assert [report.payload["text"] for report in attempt.drain() if report.kind == "note"] == ["noted"]
    log = (open_store(request.store_url).read(request.log_key) or b"").decode()
    assert "hello from the stage" in log
    assert "and a word of warning" in log


def test_a_killed_process_is_an_infrastructure_failure(project, backend) -> None:
    attempt = backend.start(make_request(project, "sleep"))
    os.kill(int(wait_for_note(attempt)), signal.SIGKILL)
    outcome = wait(attempt)
    assert outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.INFRA
    assert "process died" in outcome.failure.message


def test_an_ended_attempt_leaves_no_process(project, backend) -> None:
    attempt = backend.start(make_request(project, "sleep"))
    pid = int(wait_for_note(attempt))
    attempt.end()
    attempt.end()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_attempt_that_waits_says_for_what(project, backend) -> None:
    holder = backend.start(make_request(project, "sleep", cpus=4))
    wait_for_note(holder)
    waiting = backend.start(make_request(project, "say", cpus=1))
    assert waiting.poll() is None
    assert waiting.state().startswith("waiting for 1 CPUs")
    holder.end()
    assert wait(waiting).failure is None


def test_the_placement_groups_of_an_ended_attempt_are_removed(project, backend) -> None:
    import ray

    from pipeline.cluster.ray_placement import group_name, remove_groups

    def states(name: str) -> list[str]:
        return [group["state"] for group in ray.util.placement_group_table().values() if group["name"] == name]

    request = make_request(project, "sleep")
    attempt = backend.start(request)
    wait_for_note(attempt)
    name = f"run/{request.stage}/1"
    for owner in (name, "another"):
        ray.get(ray.util.placement_group([{"CPU": 0.5}], name=group_name(owner)).ready(), timeout=60)
    attempt.end()
    deadline = time.monotonic() + 20
    while states(group_name(name)) != ["REMOVED"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert remove_groups(name) == 0
    assert states(group_name("another")) == ["CREATED"]
    assert remove_groups("another") == 1
