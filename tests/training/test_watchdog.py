"""A rank without progress says what it waits for, and ends; slow steps are no fault."""

import threading
import time

from pipeline.errors import PipelineError, PreemptedError
from pipeline.training.failure import StalledError, WaitingError
from pipeline.training.faults.requests import Flag, answered, ask
from pipeline.training.faults.watchdog import SLOW_STEPS, Watchdog

LIMIT_SECONDS = 0.3


def watchdog(**given) -> tuple[Watchdog, list[PipelineError], threading.Event]:
    told: list[PipelineError] = []
    ended = threading.Event()

    def end(error: PipelineError) -> None:
        told.append(error)
        ended.set()

    fields = {
        "rank": 1,
        "step_timeout_seconds": LIMIT_SECONDS,
        "start_timeout_seconds": 2 * LIMIT_SECONDS,
        "grace_seconds": 60.0,
    }
    return Watchdog(**(fields | given), end=end), told, ended


def test_it_names_rank_step_wait_and_stacks() -> None:
    watched, told, ended = watchdog()
    with watched.watching():
        watched.step_done()
        watched.waits_for("data", step=7, detail=lambda: "train-00003.npy of s3://corpus")
        assert ended.wait(10)
    (error,) = told
    assert type(error) is StalledError
    assert error.message.startswith("rank 1, step 8, waiting for data (train-00003.npy of s3://corpus): no pro")
    assert "test_it_names_rank_step_wait_and_stacks" in error.message
    assert "step_timeout_seconds" in error.hint


def test_waiting_for_others_may_be_a_consequence() -> None:
    watched, told, ended = watchdog()
    with watched.watching():
        watched.step_done()
        watched.waits_for("forward and backward", step=0)
        assert ended.wait(10)
    assert type(told[0]) is WaitingError


def test_the_start_may_take_longer_than_a_step() -> None:
    watched, told, ended = watchdog()
    assert watched.limit_seconds == 2 * LIMIT_SECONDS
    with watched.watching():
        assert not ended.wait(1.3 * LIMIT_SECONDS)
        assert ended.wait(10)
    assert "start_timeout_seconds" in told[0].hint
    assert "waiting for start" in told[0].message


def test_slow_steps_raise_the_limit() -> None:
    watched, told, _ = watchdog()
    with watched.watching():
        watched.step_done()
        time.sleep(0.2)
        watched.step_done()
        assert SLOW_STEPS * 0.2 <= watched.limit_seconds < SLOW_STEPS * 0.4
        time.sleep(2 * LIMIT_SECONDS)
    assert told == []


def test_progress_that_is_no_step_counts_too() -> None:
    watched, told, _ = watchdog(step_timeout_seconds=1.0, start_timeout_seconds=2.0)
    with watched.watching():
        watched.step_done()
        for _ in range(4):
            time.sleep(0.3)
            watched.progress()
    assert told == []


def test_a_process_that_was_asked_to_make_way_ends_within_its_grace() -> None:
    watched, told, ended = watchdog(step_timeout_seconds=60.0, start_timeout_seconds=90.0, grace_seconds=0.2)
    try:
        with watched.watching():
            watched.waits_for("data", step=2)
            ask(Flag.PREEMPT, reason="node 10.0.0.7 is drained")
            assert ended.wait(10)
    finally:
        answered(Flag.PREEMPT)
    (error,) = told
    assert isinstance(error, PreemptedError)
    assert error.exit_code == 75
    assert "rank 1, step 3, waiting for data: node 10.0.0.7 is drained asked training to make way" in error.message
