"""kill -9 at bad moments: the run recovers, or says what happened and can be taken up."""

import json
import signal
import sqlite3
import time

import psutil
import pytest
from flow_project import FLOW, end, events_until, has_committed_step

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

HEAD_NOTICED_SECONDS = 60.0
"""Eight looks of 2 s, and the end of the process."""
WAITING = """
flow: waiting
stages:
  only:
    uses: python.call
    with: {call: "waiting:wait", outputs: [value]}
"""
WAITING_CODE = """
import time
from pipeline.stages.protocol import StageResult

def wait(context):
    context.reporter.note("here")
    while not (context.project_root / "go").exists():
        time.sleep(0.1)
    (context.output("value") / "done").touch()
    return StageResult()
"""
LONG = FLOW.replace("steps: 12", "steps: 60")


@pytest.fixture(scope="module")
def project(make_project):
    return make_project(LONG)


def finished(process):
    lines = [json.loads(line) for line in process.communicate(timeout=280)[0].splitlines() if line.startswith("{")]
    return process.returncode, lines


def lives(process: psutil.Process) -> bool:
    """False for a process that has ended and that nobody has waited for, too."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_stage_worker_is_replaced_and_training_goes_on_from_its_commit(project) -> None:
    process = project.start("run", "flow.yaml")
    events_until(process, has_committed_step(8))
    project.find_process("ray::StageWorker").kill()
    code, _ = finished(process)
    assert code == 0
    (view,) = project.json("runs")[:1]
    train = next(stage for stage in project.json("show", view["run_id"])["stages"] if stage["name"] == "train")
    assert [attempt["status"] for attempt in train["attempts"]] == ["FAILED", "DONE"]
    assert train["attempts"][0]["failure_class"] == "infra"
    assert "process died" in train["attempts"][0]["error"]
    assert train["metrics"]["resumed_from_step"] >= 8


def test_a_killed_rank_is_replaced_inside_the_attempt(project) -> None:
    process = project.start("run", "flow.yaml", "-P", "learning_rate=2e-3")
    events_until(process, has_committed_step(8))
    project.find_process("ray::RayTrainWorker").kill()
    code, _ = finished(process)
    assert code == 0
    view = project.json("show", "latest")
    train = next(stage for stage in view["stages"] if stage["name"] == "train")
    assert [attempt["status"] for attempt in train["attempts"]] == ["DONE"]
    assert train["metrics"]["resumed_from_step"] >= 8
    assert next(stage for stage in view["stages"] if stage["name"] == "data")["status"] == "REUSED"


def test_a_killed_driver_is_seen_as_crashed_and_the_run_is_taken_up(project) -> None:
    process = project.start("run", "flow.yaml", "-P", "learning_rate=1e-3")
    events_until(process, has_committed_step(8))
    assert end(process) == -signal.SIGKILL
    crashed = project.json("runs")[0]
    assert crashed["status"] == "CRASHED"
    assert "pipeline rerun" in crashed["error"]
    with sqlite3.connect(project.state / "mlflow.db") as tracking:
        told = tracking.execute(
            "select status from runs where run_uuid in (select run_uuid from tags where key = 'pipeline.run_id' and "
            "value = ?)",
            (crashed["run_id"],),
        ).fetchall()
    assert told
    assert ("RUNNING",) not in told
    project.run("rerun", crashed["run_id"])
    view = project.json("show", crashed["run_id"])
    assert view["status"] == "DONE"
    train = next(stage for stage in view["stages"] if stage["name"] == "train")
    assert train["metrics"]["resumed_from_step"] >= 8
    assert [attempt["status"] for attempt in train["attempts"]][-1] == "DONE"


def test_ctrl_c_ends_in_order_and_the_next_run_goes_on_from_the_commit(project) -> None:
    process = project.start("run", "flow.yaml", "-P", "learning_rate=4e-3")
    events_until(process, has_committed_step(8))
    process.send_signal(signal.SIGINT)
    code, _ = finished(process)
    assert code == 130
    assert project.json("runs")[0]["status"] == "INTERRUPTED"
    deadline = time.monotonic() + 30
    while any("RayTrainWorker" in " ".join(p.cmdline()) for p in project.head_processes() if p.is_running()):
        assert time.monotonic() < deadline, "training ranks were left behind"
        time.sleep(0.5)
    project.run("run", "flow.yaml", "-P", "learning_rate=4e-3")
    train = next(stage for stage in project.json("show", "latest")["stages"] if stage["name"] == "train")
    assert train["metrics"]["resumed_from_step"] >= 8


def test_a_killed_head_fails_the_run_at_once_and_it_is_taken_up_on_a_new_one(make_project) -> None:
    project = make_project(WAITING)
    (project.root / "waiting.py").write_text(WAITING_CODE)
    process = project.start("run", "flow.yaml")
    events_until(process, lambda event: event["event"] == "report" and event["kind"] == "note")
    killed = project.head_processes()
    next(one for one in killed if one.name() == "gcs_server").kill()
    told_at = time.monotonic()
    code, _ = finished(process)
    assert code == 3
    assert time.monotonic() - told_at < HEAD_NOTICED_SECONDS
    failed = project.json("runs")[0]
    assert failed["status"] == "FAILED"
    assert "does not answer any more" in failed["error"]
    (project.root / "go").touch()
    project.run("rerun", failed["run_id"])
    # Ray's own agents outlive their head; a new one is started only after they were ended.
    assert [one.name() for one in killed if lives(one)] == []
    assert project.json("show", failed["run_id"])["status"] == "DONE"
