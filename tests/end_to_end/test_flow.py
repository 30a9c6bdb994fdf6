"""The main job, as a user types it: train, convert, prove, register, serve; again; with a change; down."""

import json
import re
import sqlite3
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from flow_project import FULL_FLOW, Project

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(make_project) -> Project:
    return make_project(FULL_FLOW)


@pytest.fixture(scope="module")
def first(project: Project):
    """The first run and what it printed."""
    done = project.run("run", "flow.yaml")
    return done.stdout, project.json("show", "latest")


def stage_of(view, name):
    return next(stage for stage in view["stages"] if stage["name"] == name)


def complete(url: str, **fields) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "def main", "max_tokens": 8, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def test_every_stage_is_done_and_the_command_says_how_to_go_on(first) -> None:
    printed, view = first
    assert {stage["status"] for stage in view["stages"]} == {"DONE"}
    for words in ("serving:", "curl ", "stop:     pipeline down", "report:"):
        assert words in printed
    assert "(raylet)" not in printed
    assert "INFO" not in printed


def test_training_learned_and_the_gates_were_held(first) -> None:
    _, view = first
    train = stage_of(view, "train")["metrics"]
    assert train["validation_loss"] < train["initial_validation_loss"] - 0.2
    parity = stage_of(view, "parity")
    assert parity["metrics"]["max_abs_logit_difference"] <= 1e-3
    assert parity["metrics"]["greedy_match"] == parity["metrics"]["tensors_identical"] == 1.0
    assert 0.0 < parity["metrics"]["max_block_relative_error"] <= 1e-5
    assert parity["facts"]["first_block_over_limit"] is None
    assert all(gate["holds"] for gate in parity["gates"])
    # The same loss by torch in training and by Flax after conversion; other rows, hence not the same digits.
    assert stage_of(view, "quality")["metrics"]["validation_loss"] == pytest.approx(train["validation_loss"], abs=0.5)


def test_the_endpoint_answers_plainly_and_streaming_with_the_same_text(first) -> None:
    url = stage_of(first[1], "serve")["facts"]["url"]
    answer = json.loads(complete(url))
    text = answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8
    lines = [line for line in complete(url, stream=True).decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text
    with urllib.request.urlopen(f"{url}/models", timeout=10) as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["tiny"]


def test_mlflow_has_the_lineage(first, project: Project) -> None:
    view = first[1]
    with sqlite3.connect(project.state / "mlflow.db") as store:
        tags = {
            (run, key): value for run, key, value in store.execute("select run_uuid, key, value from tags").fetchall()
        }
        status = dict(store.execute("select run_uuid, status from runs").fetchall())
        alias = store.execute("select alias, version from registered_model_aliases where name = 'tiny'").fetchall()
        curve = store.execute("select count(*) from metrics where key = 'loss'").fetchone()[0]
        inputs = store.execute("select count(*) from datasets").fetchone()[0]
        version_tags = dict(store.execute("select key, value from model_version_tags where name = 'tiny'").fetchall())
    children = [run for (run, key), _ in tags.items() if key == "mlflow.parentRunId"]
    stages = {tags.get((run, "pipeline.stage")) for run in children}
    assert stages >= {stage["name"] for stage in view["stages"]}
    assert set(status.values()) == {"FINISHED"}
    assert alias == [("champion", 1)]
    assert curve >= 12
    assert inputs >= 1
    assert any("max_abs_logit_difference" in key for key in version_tags)
    assert list(project.state.rglob("figures/block_relative_error.svg"))


def test_the_report_is_one_page_with_everything(first) -> None:
    path = re.search(r"report:\s+(\S+)", first[0])
    assert path is not None
    text = Path(path[1]).read_text()
    for words in ("max_abs_logit_difference", "validation_loss", "champion", "<svg", "Relative error of each block"):
        assert words in text
    assert not re.search(r"(src=|<link[^>]*href=|url\()[\"']?https?://", text), "the page needs nothing from outside"


def test_the_deployment_is_listed_with_its_history(first, project: Project) -> None:
    (row,) = project.json("deployments")
    assert (row["name"], row["version"], row["running"], row["health"]) == ("tiny", "1", 1, "ok")
    assert row["endpoint"] == stage_of(first[1], "serve")["facts"]["url"]
    (event,) = project.json("deployments", "tiny")
    assert (event["action"], event["how"], event["source"]) == ("deploy", "started", None)
    assert "holds" in event["gates"]["max_abs_logit_difference"] and "@" in event["who"]
    with sqlite3.connect(project.state / "mlflow.db") as store:
        tags = store.execute("select key from model_version_tags where name = 'tiny'").fetchall()
    assert any(key.startswith("deployment.tiny.deploy.") for (key,) in tags)
    assert "never served another version" in project.run("rollback", "tiny", code=2).stderr
    assert "did you mean 'tiny'" in project.run("promote", "tinny", "1", code=2).stderr


def test_running_again_reuses_everything_and_touches_no_process(first, project: Project) -> None:
    before = {process.pid for process in project.head_processes()}
    started = time.monotonic()
    done = project.run("run", "flow.yaml")
    elapsed = time.monotonic() - started
    view = project.json("show", "latest")
    assert {stage["status"] for stage in view["stages"]} == {"REUSED"}
    assert all(f"same fingerprint as run {first[1]['run_id']}" in stage["reason"] for stage in view["stages"])
    assert {process.pid for process in project.head_processes()} <= before
    assert "curl " in done.stdout
    assert elapsed < 60, "a hang, not a slow machine"


def test_the_plan_says_the_same(first, project: Project) -> None:
    plan = project.json("plan", "flow.yaml")
    assert {stage["action"] for stage in plan["stages"]} == {"REUSE"}
    changed = project.json("plan", "flow.yaml", "-P", "steps=13")
    actions = {stage["name"]: stage["action"] for stage in changed["stages"]}
    assert actions["data"] == "REUSE"
    assert actions["train"] == "RUN"
    assert "steps: 12 -> 13" in next(stage for stage in changed["stages"] if stage["name"] == "train")["reason"]


def test_a_gate_stops_the_flow_and_the_old_endpoint_stays(first, project: Project) -> None:
    done = project.run("run", "flow.yaml", "-P", "max_validation_loss=1.5", code=1)
    view = project.json("show", "latest")
    statuses = {stage["name"]: stage["status"] for stage in view["stages"]}
    assert statuses["quality"] == "FAILED"
    assert statuses["parity"] == "REUSED"
    assert statuses["register"] == "SKIPPED"
    assert statuses["serve"] == "SKIPPED"
    assert "validation_loss" in done.stderr
    assert complete(stage_of(first[1], "serve")["facts"]["url"])


def test_logs_are_kept(first, project: Project) -> None:
    printed = project.run("logs", first[1]["run_id"], "train").stdout
    assert "training on cpu with gloo" in printed
    missing = project.run("logs", "latest", "nosuch", code=2)
    assert "nosuch" in missing.stderr


def test_down_stops_the_endpoint_and_every_process(first, project: Project) -> None:
    url = stage_of(first[1], "serve")["facts"]["url"]
    pids = [process.pid for process in project.head_processes()]
    assert "stopped" in project.run("down").stdout
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"{url}/models", timeout=5)
    assert "nothing runs" in project.run("down").stdout
    plan = project.json("plan", "flow.yaml")
    serve = next(stage for stage in plan["stages"] if stage["name"] == "serve")
    assert serve["action"] == "RUN"
