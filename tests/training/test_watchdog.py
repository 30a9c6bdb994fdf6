"""A rank without progress says what it waits for, and ends; slow steps are no fault."""

import threading
import time

import pytest

from pipeline.errors import PipelineError, PreemptedError
from pipeline.training.failure import StalledError, WaitingError
from pipeline.training.faults.requests import Flag, answered, ask
from pipeline.training.faults.watchdog import SLOW_STEPS, Watchdog

LIMIT_SECONDS = 30.0
"""Longer than a busy machine keeps a test waiting."""


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


def leave_idle(watched: Watchdog, seconds: float) -> None:
    """Let the last progress be so long ago."""
    watched._progress_at = time.monotonic() - seconds


def test_it_names_rank_step_wait_and_stacks() -> None:
    watched, told, ended = watchdog()
    others = [threading.Thread(target=ended.wait, args=(30,)) for _ in range(120)]  # more than faulthandler shows
    for other in others:
        other.start()
    with watched.watching():
        watched.step_done()
        watched.waits_for("data", step=7, detail=lambda: "train-00003.npy of s3://corpus")
        leave_idle(watched, 1.1 * LIMIT_SECONDS)
        assert ended.wait(10)
    for other in others:
        other.join()
    (error,) = told
    assert type(error) is StalledError
    assert error.message.startswith("rank 1, step 8, waiting for data (train-00003.npy of s3://corpus): no pro")
    assert "test_it_names_rank_step_wait_and_stacks" in error.message
    assert "`faults.step_timeout_seconds`" in error.hint


@pytest.mark.parametrize("what", ["forward and backward", "the update", "the other ranks", "a checkpoint"])
def test_waiting_for_others_may_be_a_consequence(what: str) -> None:
    watched, _, _ = watchdog()
    watched.step_done()
    watched.waits_for(what, step=0)
    leave_idle(watched, 1.1 * LIMIT_SECONDS)
    assert type(watched.problem()) is WaitingError


def test_the_start_may_take_longer_than_a_step() -> None:
    watched, _, _ = watchdog()
    assert watched.limit_seconds == 2 * LIMIT_SECONDS
    leave_idle(watched, 1.5 * LIMIT_SECONDS)
    assert watched.problem() is None
    leave_idle(watched, 2.1 * LIMIT_SECONDS)
    error = watched.problem()
    assert error is not None
    assert "`faults.start_timeout_seconds`" in error.hint
    assert "waiting for start" in error.message


def test_slow_steps_raise_the_limit() -> None:
    watched, _, _ = watchdog()
    watched.step_done()
    leave_idle(watched, 2 * LIMIT_SECONDS)
    watched.step_done()
    assert watched.limit_seconds == pytest.approx(SLOW_STEPS * 2 * LIMIT_SECONDS, rel=0.1)
    leave_idle(watched, 5 * LIMIT_SECONDS)
    assert watched.problem() is None


def test_a_save_may_take_its_own_deadline() -> None:
    watched, _, _ = watchdog()
    watched.step_done()
    watched.waits_for("a checkpoint", own_limit=("checkpoint_timeout_seconds", 3 * LIMIT_SECONDS))
    leave_idle(watched, 2 * LIMIT_SECONDS)
    assert watched.problem() is None
    leave_idle(watched, 3.1 * LIMIT_SECONDS)
    error = watched.problem()
    assert error is not None
    assert "`checkpoint_timeout_seconds`" in error.hint
    watched.waits_for("data")
    assert watched.limit_seconds == LIMIT_SECONDS


def test_progress_that_is_no_step_counts_too() -> None:
    watched, _, _ = watchdog()
    watched.step_done()
    leave_idle(watched, 2 * LIMIT_SECONDS)
    watched.progress()
    assert watched.problem() is None


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
