"""Runs whose driver died are told apart, and ids may be shortened."""

import json
import time

import pytest

from pipeline.artifacts.store import Store, open_store
from pipeline.errors import UsageError
from pipeline.execution.history import load_runs, match_run
from pipeline.execution.journal import Journal, RunRecord, read_run
from pipeline.execution.leases import LEASE_SECONDS, Holder, Leases
from pipeline.tracking.view import AttemptView, RunStatus, RunView, StageStatus, StageView

ELSEWHERE = Holder(host="another-machine", pid=1, process_started_at=0.0)


def begin(store: Store, run_id: str, *, now: float) -> Journal:
    journal = Journal(store, run_id)
    journal.begin(
        RunRecord(
            run_id=run_id,
            flow="llm",
            flow_file="flow.yaml",
            flow_text="",
            resolved_text="",
            overrides=(),
            project_root="/",
            parameters={},
            host="another-machine",
            user="u",
            pid=1,
            started_at=now,
            ephemeral=False,
        )
    )
    journal.run_event(RunStatus.RUNNING, time=now)
    journal.stage_event(
        StageView(
            name="train",
            kind="train.fsdp",
            status=StageStatus.RUNNING,
            reason="never run",
            attempts=(AttemptView(attempt=1, started_at=now),),
        ),
        time=now,
    )
    return journal


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(str(tmp_path))


def test_a_run_whose_lease_expired_is_crashed_and_told_once(store: Store) -> None:
    now = time.time()
    theirs = Leases(store, holder=ELSEWHERE, clock=lambda: now)
    theirs.acquire("runs/20260101-000000-aaaa")
    begin(store, "20260101-000000-aaaa", now=now)
    ours = Leases(store, holder=Holder.current(), clock=lambda: now)
    crashed: list[RunView] = []
    alive = load_runs(store, leases=ours, now=now + 1, on_crash=crashed.append)
    assert [view.status for view in alive] == [RunStatus.RUNNING]
    dead = load_runs(store, leases=ours, now=now + LEASE_SECONDS + 1, on_crash=crashed.append)
    assert [view.status for view in dead] == [RunStatus.CRASHED]
    assert dead[0].stages[0].status is StageStatus.INTERRUPTED
    assert dead[0].stages[0].attempts[0].ended_at is not None
    load_runs(store, leases=ours, now=now + LEASE_SECONDS + 2, on_crash=crashed.append)
    assert len(crashed) == 1


def test_an_event_that_was_lost_costs_history_only(store: Store) -> None:
    journal = begin(store, "20260101-000000-aaaa", now=1.0)
    journal.run_event(RunStatus.DONE, time=5.0)
    store.delete("runs/20260101-000000-aaaa/events/000001.json")
    view = read_run(store, "20260101-000000-aaaa", series=False)
    assert view.status is RunStatus.DONE
    assert view.stages == ()


def test_a_run_that_was_recorded_before_stages_had_hops_is_still_read(store: Store) -> None:
    begin(store, "20260101-000000-aaaa", now=1.0)
    key = "runs/20260101-000000-aaaa/events/000001.json"
    event = json.loads(store.read(key) or b"")
    del event["stage"]["hops"]
    store.write(key, json.dumps(event).encode())
    (stage,) = read_run(store, "20260101-000000-aaaa", series=False).stages
    assert stage.name == "train"
    assert stage.hops == ()


def test_ids_may_be_shortened_when_that_is_unique(store: Store) -> None:
    for run_id in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        begin(store, run_id, now=1.0)
    assert match_run(store, "latest") == "20260102-000000-bbbb"
    assert match_run(store, "aaaa") == "20260101-000000-aaaa"
    assert match_run(store, "20260102") == "20260102-000000-bbbb"
    with pytest.raises(UsageError, match="2 runs match '2026'"):
        match_run(store, "2026")
    with pytest.raises(UsageError, match="no run matches 'zzzz'; the newest are: 20260101"):
        match_run(store, "zzzz")
