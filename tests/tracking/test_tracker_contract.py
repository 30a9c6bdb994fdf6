"""What every tracker must do, over the one of MLflow and the one in memory."""

import threading
import time
import uuid
from dataclasses import dataclass, replace

import pytest
from sample_run import START, llm_run

from pipeline.errors import TrackingError
from pipeline.stages.protocol import Report
from pipeline.tracking.memory_tracker import MemoryRegistry, MemoryTracker
from pipeline.tracking.view import AttemptView, RunStatus, StageStatus


@dataclass
class Seen:
    """A child run as a reader finds it."""

    stage: str
    attempt: str
    closed_as: str
    parameters: dict
    metrics: dict


class MemoryReader:
    def __init__(self, tracker):
        self.tracker = tracker

    def parent(self, run_id):
        return self.tracker.runs[run_id].status.value

    def num_parents(self, run_id):
        return int(run_id in self.tracker.runs)

    def children(self, run_id):
        return [
            Seen(
                stage=child.stage.name,
                attempt=str(child.attempt),
                closed_as=child.status.value,
                parameters=dict(child.parameters),
                metrics={
                    **{k: v for r in child.reports if r.kind == "metrics" for k, v in r.payload.items()},
                    **child.stage.metrics,
                },
            )
            for child in self.tracker.runs[run_id].attempts
        ]


class MlflowReader:
    def __init__(self, tracker, client):
        self.tracker, self.client = tracker, client

    def _runs(self, run_id, role):
        assert self.tracker._delivery.flush(timeout_seconds=60)
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        found = self.client.search_runs(experiments, f"tags.`pipeline.run_id` = '{run_id}'")
        found = sorted(found, key=lambda run: (run.info.start_time, run.info.run_name))
        return [run for run in found if run.data.tags["pipeline.role"] in role]

    def parent(self, run_id):
        (run,) = self._runs(run_id, ("run",))
        return run.data.tags["pipeline.status"]

    def num_parents(self, run_id):
        return len(self._runs(run_id, ("run",)))

    def children(self, run_id):
        (parent,) = self._runs(run_id, ("run",))
        children = self._runs(run_id, ("attempt", "reused"))
        assert all(child.data.tags["mlflow.parentRunId"] == parent.info.run_id for child in children)
        return [
            Seen(
                stage=child.data.tags["pipeline.stage"],
                attempt=child.data.tags.get("pipeline.attempt", "0"),
                closed_as=child.data.tags["pipeline.status"],
                parameters=child.data.params,
                metrics=child.data.metrics,
            )
            for child in children
        ]


@pytest.fixture(params=["memory", "mlflow"])
def tracked(request):
    """A tracker and a reader of what it remembers."""
    if request.param == "memory":
        tracker = MemoryTracker(registry=MemoryRegistry())
        return tracker, MemoryReader(tracker)
    tracker = request.getfixturevalue("mlflow_tracker")
    return tracker, MlflowReader(tracker, request.getfixturevalue("mlflow_client"))


@pytest.fixture
def run():
    return replace(llm_run(status=RunStatus.RUNNING), run_id=f"run-{uuid.uuid4().hex[:12]}", flow="contract")


def open_stage(run, name="train", *, attempt=1):
    stage = next(stage for stage in run.stages if stage.name == name)
    view = AttemptView(attempt=attempt, started_at=START + attempt)
    return replace(stage, status=StageStatus.RUNNING, attempts=(view,), metrics={}, gates=(), series={})


def closed(stage, status, **changes):
    last = replace(stage.attempts[-1], status=status, ended_at=stage.attempts[-1].started_at + 2)
    return replace(stage, status=status, attempts=(*stage.attempts[:-1], last), **changes)


def metrics(values, step):
    return Report(kind="metrics", payload=values, time=START + step, step=step)


def test_a_run_and_its_attempts_are_remembered_with_their_status(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    failing = open_stage(run)
    tracker.start_attempt(run.run_id, failing, attempt=1, parameters={"steps": 3, "optimizer": {"name": "adamw"}})
    tracker.report(run.run_id, "train", attempt=1, reports=[metrics({"loss": 2.0}, 1)])
    tracker.finish_attempt(run.run_id, closed(failing, StageStatus.FAILED), attempt=1, log_path=None)
    again = open_stage(run, attempt=2)
    tracker.start_attempt(run.run_id, again, attempt=2, parameters={"steps": 3})
    tracker.report(run.run_id, "train", attempt=2, reports=[metrics({"loss": 1.5}, 1), metrics({"loss": 1.0}, 2)])
    done = closed(again, StageStatus.DONE, metrics={"train_loss": 1.0})
    tracker.finish_attempt(run.run_id, done, attempt=2, log_path=None)
    tracker.finish_run(replace(run, status=RunStatus.DONE, stages=(done,)), report_path=None)
    first, second = reader.children(run.run_id)
    assert (first.stage, first.attempt, first.closed_as) == ("train", "1", "FAILED")
    assert first.parameters == {"steps": "3", "optimizer.name": "adamw"}
    assert first.metrics == {"loss": 2.0}
    assert (second.attempt, second.closed_as) == ("2", "DONE")
    assert second.metrics == {"loss": 1.0, "train_loss": 1.0}
    assert reader.parent(run.run_id) == "DONE"
    assert tracker.gap == 0


def test_a_reused_stage_is_a_closed_child(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    for _ in range(2):
        tracker.record_reuse(run.run_id, run.stages[0], parameters={"source": "stdlib"})
    (child,) = reader.children(run.run_id)
    assert (child.stage, child.closed_as) == ("data", "REUSED")
    assert child.parameters == {"source": "stdlib"}
    assert child.metrics["num_documents"] == 1632


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.INTERRUPTED])
def test_the_final_status_of_a_run_is_kept(tracked, run, status):
    tracker, reader = tracked
    tracker.start_run(run)
    assert reader.parent(run.run_id) == "RUNNING"
    tracker.finish_run(replace(run, status=status), report_path=None)
    assert reader.parent(run.run_id) == status.value


def test_a_run_is_taken_up_again_and_not_opened_twice(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    tracker.finish_run(replace(run, status=RunStatus.FAILED), report_path=None)
    tracker.start_run(run)
    assert reader.num_parents(run.run_id) == 1
    assert reader.parent(run.run_id) == "RUNNING"


def test_reconciling_closes_what_is_open_and_nothing_else(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    done = open_stage(run, "flax")
    tracker.start_attempt(run.run_id, done, attempt=1, parameters={})
    tracker.finish_attempt(run.run_id, closed(done, StageStatus.DONE), attempt=1, log_path=None)
    tracker.start_attempt(run.run_id, open_stage(run), attempt=1, parameters={})
    tracker.reconcile(run.run_id, RunStatus.CRASHED)
    tracker.reconcile("a-run-nobody-knows", RunStatus.CRASHED)
    assert reader.parent(run.run_id) == "CRASHED"
    assert {child.stage: child.closed_as for child in reader.children(run.run_id)} == {
        "flax": "DONE",
        "train": "CRASHED",
    }
    assert tracker.gap == 0


def test_an_attempt_whose_opening_was_lost_appears_when_it_ends(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    stage = closed(open_stage(run), StageStatus.DONE, metrics={"train_loss": 1.0})
    tracker.finish_attempt(run.run_id, stage, attempt=1, log_path=None)
    (child,) = reader.children(run.run_id)
    assert (child.closed_as, child.metrics["train_loss"]) == ("DONE", 1.0)


def test_several_threads_may_report(tracked, run):
    tracker, reader = tracked
    tracker.start_run(run)
    names = ["train", "flax", "quality"]
    for name in names:
        tracker.start_attempt(run.run_id, open_stage(run, name), attempt=1, parameters={})

    def report(name):
        for step in range(20):
            tracker.report(run.run_id, name, attempt=1, reports=[metrics({"value": float(step)}, step)])

    threads = [threading.Thread(target=report, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {child.stage: child.metrics["value"] for child in reader.children(run.run_id)} == dict.fromkeys(names, 19.0)


def test_every_call_returns_at_once(tracked, run):
    tracker, _ = tracked
    started = time.perf_counter()
    tracker.start_run(run)
    tracker.start_attempt(run.run_id, open_stage(run), attempt=1, parameters={})
    for step in range(200):
        tracker.report(run.run_id, "train", attempt=1, reports=[metrics({"loss": 1.0}, step)])
    assert time.perf_counter() - started < 0.5


def test_versions_count_up_and_the_alias_moves(tracked, run):
    tracker, _ = tracked
    tracker.start_run(run)
    name = f"model-{run.run_id}"

    def register(fingerprint):
        tags = {"pipeline.run_id": run.run_id, "pipeline.fingerprint": fingerprint}
        return tracker.registry.register(
            name=name, source="/models/x", tags=tags, alias="champion", description="from a test"
        )

    first, again, second = register("a"), register("a"), register("b")
    assert (first.version, again.version, second.version) == ("1", "1", "2")
    assert (second.name, second.alias, second.uri) == (name, "champion", f"models:/{name}/2")


def test_without_a_registry_registering_is_an_error_that_says_what_to_do():
    with pytest.raises(TrackingError, match="--no-tracking"):
        MemoryTracker().registry.register(name="m", source="s", tags={}, alias=None, description="")
