"""What a run does with stages that failed: the lease that a retry holds, and what stays where a hop keeps it."""

import time
from dataclasses import replace

import pytest

from pipeline.artifacts.commit import find_commit
from pipeline.artifacts.store import open_store
from pipeline.errors import FailureClass, StoreError
from pipeline.execution import runner
from pipeline.execution.driver import RunResult
from pipeline.plan.stage import Hop
from pipeline.tracking.view import RunStatus, StageStatus, StageView


def stage(result: RunResult, name: str) -> StageView:
    return next(view for view in result.view.stages if view.name == name)


def test_a_stage_that_keeps_the_champion_does_not_fail_the_run(bench) -> None:
    # Kinds that have a champion need a cluster; the chain is the same.
    flow = """
    flow: keeps
    stages:
      only:
        uses: python.call
        with: {call: "MODULE:raise_error", outputs: [value]}
    """
    keep = Hop(on=(FailureClass.USER,), stage=None)
    result = bench.run(flow, change=lambda it: replace(it, stages=(replace(it.stages[0], fallback=(keep,)),)))
    assert result.view.status is RunStatus.DONE
    only = stage(result, "only")
    assert only.status is StageStatus.SKIPPED
    assert only.reason.startswith("the champion stays: ValueError: no such luck")
    assert [hop.to for hop in only.hops] == ["keep the champion (on user)"]


def test_a_champion_is_not_kept_once_the_stage_has_replaced_it(bench) -> None:
    flow = """
    flow: replaced
    stages:
      only:
        uses: python.call
        with: {call: "MODULE:number", arguments: {n: 5}, outputs: [value]}
        gates: {n: "<= 3"}
    """
    keep = Hop(on=(FailureClass.GATE,), stage=None)
    result = bench.run(flow, change=lambda it: replace(it, stages=(replace(it.stages[0], fallback=(keep,)),)))
    assert result.view.status is RunStatus.FAILED
    only = stage(result, "only")
    assert only.status is StageStatus.FAILED
    assert only.reason == "stage 'only': gate n = 5 FAILS <= 3"
    assert only.hops == ()


EDITED = """
flow: edited
stages:
  only:
    uses: python.call
    with: {call: "MODULE:edited", outputs: [value]}
    retry: {max_attempts: 2, backoff_seconds: 0}
"""


def test_a_retry_of_a_source_that_was_edited_meanwhile_holds_the_lease_of_what_it_computes(bench) -> None:
    result = bench.run(EDITED)
    assert result.view.status is RunStatus.DONE
    only = stage(result, "only")
    assert [attempt.status for attempt in only.attempts] == [StageStatus.FAILED, StageStatus.DONE]
    store = open_store(bench.store)
    assert find_commit(store, only.fingerprint or "") is not None
    assert len(store.list("workspaces")) <= 1


def test_storage_that_is_away_before_a_retry_does_not_leave_a_hop_waiting_for_its_own_lease(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = """
    flow: away
    stages:
      only:
        uses: python.call
        with: {call: "MODULE:flaky", arguments: {succeed_on: 2}, outputs: [value]}
        retry: {max_attempts: 2, backoff_seconds: 0}
        fallback:
          - timeout_seconds: 60
    """
    plans = []

    def plan_or_fail(*given, **named):
        plans.append(given)
        if len(plans) == 2:
            raise StoreError("the store does not answer")
        return runner_plan(*given, **named)

    runner_plan = runner.plan_stage
    monkeypatch.setattr(runner, "plan_stage", plan_or_fail)
    began = time.monotonic()
    result = bench.run(flow, is_interrupted=lambda: time.monotonic() - began > 20)
    assert result.view.status is RunStatus.DONE
    (hop,) = stage(result, "only").hops
    assert hop.error == "the store does not answer"
