"""What a run does with its stages: order, reuse, gates, retries, failure, interruption."""

import json
import threading
import time

import pytest

from pipeline.artifacts.commit import find_commit
from pipeline.artifacts.store import open_store
from pipeline.errors import FailureClass, LeaseError, UsageError
from pipeline.execution.driver import RunResult
from pipeline.execution.journal import read_run
from pipeline.tracking.view import RunStatus, StageStatus

CHAIN = """
flow: chain
params:
  n: {type: int, default: 3}
stages:
  first:
    uses: python.call
    with: {call: "MODULE:number", arguments: {n: "${params.n}"}, outputs: [value]}
  second:
    uses: python.call
    with: {call: "MODULE:double", inputs: {n: "${stages.first.outputs.value}"}, outputs: [value]}
  other:
    uses: python.call
    with: {call: "MODULE:number", arguments: {n: 5}, outputs: [value]}
"""


def statuses(result: RunResult) -> dict[str, str]:
    return {stage.name: stage.status.value for stage in result.view.stages}


def stage(result: RunResult, name: str):
    return next(view for view in result.view.stages if view.name == name)


def test_a_first_run_runs_everything_in_order(bench) -> None:
    result = bench.run(CHAIN)
    assert result.view.status is RunStatus.DONE
    assert set(statuses(result).values()) == {"DONE"}
    assert stage(result, "second").metrics == {"n": 6.0}
    assert stage(result, "first").reason == "never run"
    assert ("first", "numbered") in [(name, r.payload.get("text")) for name, r in bench.observer.reports]


def test_a_second_run_reuses_everything_and_says_why(bench) -> None:
    first = bench.run(CHAIN)
    second = bench.run(CHAIN)
    assert set(statuses(second).values()) == {"REUSED"}
    for view in second.view.stages:
        assert view.reason.startswith(f"same fingerprint as run {first.view.run_id}")
        assert view.producer_run_id == first.view.run_id


def test_a_changed_parameter_reruns_the_stage_and_what_depends_on_it_and_nothing_else(bench) -> None:
    bench.run(CHAIN)
    result = bench.run(CHAIN, overrides=("n=4",))
    assert statuses(result) == {"first": "DONE", "second": "DONE", "other": "REUSED"}
    assert "n: 3 -> 4" in stage(result, "first").reason
    assert "input" in stage(result, "second").reason


def test_the_code_of_a_call_is_part_of_its_identity(bench) -> None:
    bench.run(CHAIN)
    path = bench.root / f"{bench.module}.py"
    path.write_text(path.read_text() + "\n# changed\n")
    result = bench.run(CHAIN)
    # Every stage of this module has new code; the second's input is bit for bit the same.
    assert set(statuses(result).values()) == {"DONE"}
    assert "module" in stage(result, "first").reason


def test_force_runs_a_stage_again_and_keeps_its_old_commit(bench) -> None:
    bench.run(CHAIN)
    result = bench.run(CHAIN, force=frozenset({"first"}))
    assert statuses(result) == {"first": "DONE", "second": "REUSED", "other": "REUSED"}
    store = open_store(bench.store)
    fingerprint = stage(result, "first").fingerprint
    assert any(name.startswith("REPLACED-BY-") for name in store.list(f"artifacts/{fingerprint}"))


def test_force_of_an_unknown_stage_is_refused(bench) -> None:
    with pytest.raises(UsageError, match="nosuch"):
        bench.run(CHAIN, force=frozenset({"nosuch"}))


def test_a_damaged_artifact_is_computed_again(bench) -> None:
    first = bench.run(CHAIN)
    store = open_store(bench.store)
    commit = find_commit(store, stage(first, "first").fingerprint or "")
    assert commit is not None
    store.local_path(f"{commit.attempt_key}/value/n.json").write_text("4")
    second = bench.run(CHAIN)
    assert statuses(second) == {"first": "DONE", "second": "REUSED", "other": "REUSED"}
    assert "was altered" in stage(second, "first").reason


def test_a_torn_commit_is_computed_again(bench) -> None:
    first = bench.run(CHAIN)
    store = open_store(bench.store)
    store.write(f"artifacts/{stage(first, 'first').fingerprint}/COMMIT.json", b'{"format": 1, "outp')
    second = bench.run(CHAIN)
    assert second.view.status is RunStatus.DONE
    assert statuses(second)["first"] == "DONE"


GATED = CHAIN.replace("outputs: [value]}\n  second:", 'outputs: [value]}\n    gates: {n: "<= LIMIT"}\n  second:')


def test_a_gate_that_fails_stops_what_depends_on_it_and_keeps_the_artifact(bench) -> None:
    result = bench.run(GATED.replace("LIMIT", "2"))
    assert statuses(result) == {"first": "FAILED", "second": "SKIPPED", "other": "DONE"}
    assert result.failure is not None
    assert result.failure.failure_class is FailureClass.GATE
    assert "stage 'first': gate n = 3 FAILS <= 2" in result.failure.message
    again = bench.run(GATED.replace("LIMIT", "3"))
    assert statuses(again) == {"first": "REUSED", "second": "DONE", "other": "REUSED"}


def test_a_gate_is_judged_again_on_reuse(bench) -> None:
    bench.run(CHAIN)
    result = bench.run(GATED.replace("LIMIT", "2"))
    assert statuses(result)["first"] == "FAILED"
    assert statuses(result)["second"] == "SKIPPED"


FAILING = """
flow: failing
stages:
  bad:
    uses: python.call
    with: {call: "MODULE:FUNCTION", arguments: {succeed_on: 3}, outputs: [value]}
    retry: {max_attempts: 3, backoff_seconds: 0}
  after:
    uses: python.call
    with: {call: "MODULE:double", inputs: {n: "${stages.bad.outputs.value}"}, outputs: [value]}
"""


def test_code_that_raises_is_not_retried_and_its_words_are_kept(bench) -> None:
    result = bench.run(FAILING.replace("FUNCTION", "raise_error"))
    assert statuses(result) == {"bad": "FAILED", "after": "SKIPPED"}
    assert len(stage(result, "bad").attempts) == 1
    assert result.failure is not None
    assert result.failure.failure_class is FailureClass.USER
    assert "no such luck" in result.failure.message
    assert stage(result, "after").reason == "bad did not succeed"


def test_infrastructure_failures_are_retried_up_to_the_limit(bench) -> None:
    result = bench.run(FAILING.replace("FUNCTION", "flaky"))
    assert result.view.status is RunStatus.DONE
    attempts = stage(result, "bad").attempts
    assert [attempt.status for attempt in attempts] == [StageStatus.FAILED, StageStatus.FAILED, StageStatus.DONE]
    assert attempts[0].failure_class == "infra"
    assert "lost node 1" in (attempts[0].error or "")


def test_retries_end(bench) -> None:
    result = bench.run(FAILING.replace("FUNCTION", "flaky").replace("succeed_on: 3", "succeed_on: 9"))
    assert statuses(result) == {"bad": "FAILED", "after": "SKIPPED"}
    assert len(stage(result, "bad").attempts) == 3


def test_a_function_that_returns_something_else_is_told(bench) -> None:
    result = bench.run(FAILING.replace("FUNCTION", "wrong"))
    assert "returned dict; a stage returns a StageResult" in (result.failure.message if result.failure else "")


@pytest.mark.parametrize(("call", "words"), [("nosuch_module:f", "no module"), ("MODULE:nosuch", "has no 'nosuch'")])
def test_a_call_to_nothing_is_told(bench, call: str, words: str) -> None:
    result = bench.run(FAILING.replace("MODULE:FUNCTION", call))
    assert result.failure is not None
    assert result.failure.failure_class is FailureClass.CONFIG
    assert words in result.failure.message


SLOW = """
flow: slow
stages:
  wait:
    uses: python.call
    with: {call: "MODULE:slow", outputs: [value]}
"""


def test_an_interrupt_ends_the_run_and_the_next_one_finds_its_workspace(bench) -> None:
    started = time.monotonic()
    interrupted = bench.run(SLOW, is_interrupted=lambda: time.monotonic() - started > 0.5)
    assert interrupted.view.status is RunStatus.INTERRUPTED
    assert statuses(interrupted) == {"wait": "INTERRUPTED"}
    (bench.root / "stop").touch()
    result = bench.run(SLOW, rerun_of=interrupted.view.run_id)
    assert result.view.run_id == interrupted.view.run_id
    assert result.view.status is RunStatus.DONE
    commit = find_commit(open_store(bench.store), stage(result, "wait").fingerprint or "")
    assert commit is not None
    assert commit.attempt == 2
    # Both attempts wrote into the same workspace, which is gone once the stage is committed.
    value = open_store(bench.store).read(f"{commit.attempt_key}/value/n.json")
    assert json.loads(value or b"0") == 2
    assert open_store(bench.store).list(f"workspaces/{commit.fingerprint}") == []


def test_a_timeout_ends_an_attempt_as_infrastructure(bench) -> None:
    flow = SLOW + "    timeout_seconds: 0.3\n    retry: {max_attempts: 1}\n"
    result = bench.run(flow)
    (bench.root / "stop").touch()
    assert result.failure is not None
    assert result.failure.failure_class is FailureClass.INFRA
    assert "timed out after timeout_seconds: 0.3" in result.failure.message


def test_two_runs_of_one_fingerprint_compute_it_once(bench) -> None:
    results: list[RunResult] = []
    other = type(bench)(root=bench.root, module=bench.module)
    threads = [threading.Thread(target=lambda b=b: results.append(b.run(SLOW))) for b in (bench, other)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    (bench.root / "stop").touch()
    for thread in threads:
        thread.join()
    assert sorted(statuses(result)["wait"] for result in results) == ["DONE", "REUSED"]
    assert any(
        "another run computes this fingerprint" in reason for b in (bench, other) for _, reason in b.observer.waits
    )


def test_a_run_that_is_alive_cannot_be_taken_up(bench) -> None:
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(bench.run(SLOW)))
    thread.start()
    store = open_store(bench.store)
    while not store.list("runs"):
        time.sleep(0.02)
    other = type(bench)(root=bench.root, module=bench.module)
    with pytest.raises(LeaseError, match="is alive"):
        other.run(SLOW, rerun_of=store.list("runs")[0])
    (bench.root / "stop").touch()
    thread.join()


def test_the_state_of_a_run_is_rebuilt_from_the_store_alone(bench) -> None:
    result = bench.run(CHAIN)
    view = read_run(open_store(bench.store), result.view.run_id, series=True)
    assert view.status is RunStatus.DONE
    first = next(stage for stage in view.stages if stage.name == "first")
    assert [(point.step, point.value) for point in first.series["loss"]] == [(1, 2.0)]
    assert first.facts == {"why": "asked"}


def test_the_tracker_hears_of_every_attempt_and_reuse(bench) -> None:
    first = bench.run(CHAIN)
    second = bench.run(CHAIN)
    remembered = bench.tracker.runs
    assert remembered[first.view.run_id].status is RunStatus.DONE
    assert {attempt.attempt for attempt in remembered[first.view.run_id].attempts} == {1}
    assert {attempt.attempt for attempt in remembered[second.view.run_id].attempts} == {0}


def test_a_report_is_written_with_every_run(bench) -> None:
    result = bench.run(FAILING.replace("FUNCTION", "raise_error"))
    assert result.report_path is not None
    text = result.report_path.read_text()
    assert "no such luck" in text
    assert result.view.run_id in text


def test_a_stage_that_used_up_its_attempts_goes_on_with_the_next_hop(bench) -> None:
    flow = """
    flow: hops
    stages:
      only:
        uses: python.call
        with: {call: "MODULE:flaky", arguments: {succeed_on: 3}, outputs: [value]}
        retry: {max_attempts: 1, backoff_seconds: 0}
        fallback:
          - with: {arguments: {succeed_on: 9}}
          - with: {arguments: {succeed_on: 4}}
            on: [gate]
          - timeout_seconds: 60
    """
    result = bench.run(flow)
    assert result.view.status is RunStatus.DONE
    only = stage(result, "only")
    assert only.status is StageStatus.DONE
    assert only.metrics == {"tries": 3.0}
    assert [attempt.status.value for attempt in only.attempts] == ["FAILED", "FAILED", "DONE"]
    assert [(hop.after_attempt, hop.failure_class, hop.error, hop.to) for hop in only.hops] == [
        (1, "infra", "lost node 1", "arguments {'succeed_on': 9} (on infra)"),
        (2, "infra", "lost node 2", "timeout_seconds 60.0 (on infra)"),
    ]
    assert read_run(open_store(bench.store), result.view.run_id, series=False).stages[0].hops == only.hops


def test_a_gate_falls_back_only_where_the_hop_says_so(bench) -> None:
    flow = """
    flow: hops
    stages:
      strict:
        uses: python.call
        with: {call: "MODULE:number", arguments: {n: 5}, outputs: [value]}
        gates: {n: "<= 3"}
        fallback:
          - with: {arguments: {n: 4}}
          - with: {arguments: {n: 3}}
            on: [infra, gate]
    """
    result = bench.run(flow)
    assert statuses(result) == {"strict": "DONE"}
    assert stage(result, "strict").metrics == {"n": 3.0}
    (hop,) = stage(result, "strict").hops
    assert hop.failure_class == "gate"
    without = bench.run(flow.replace("infra, gate", "infra"), force=frozenset({"strict"}))
    assert without.view.status is RunStatus.FAILED
    assert stage(without, "strict").hops == ()
