"""Failpoints are off unless the environment arms them, and happen where and when it says."""

import os

import pytest

from pipeline.errors import UsageError
from pipeline.training.failure import is_out_of_memory
from pipeline.training.faults.failpoints import (
    VARIABLE,
    Failpoint,
    FailpointError,
    Happening,
    Place,
    armed,
    parse,
    reach,
    set_generation,
)


def test_conditions_and_happenings_are_read() -> None:
    assert parse("gradients@rank=1@step=7:nan; data@generation=2:hang;") == (
        Failpoint(place=Place.GRADIENTS, happening=Happening.NAN, rank=1, step=7),
        Failpoint(place=Place.DATA, happening=Happening.HANG, generation=2),
    )
    assert parse("") == ()


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse("gradient:nan; data@step=x:kil")
    for found in ("unknown place 'gradient'", "'gradients'?", "condition 'step=x'", "unknown happening 'kil'"):
        assert found in caught.value.message


def test_a_place_fails_only_where_every_condition_holds() -> None:
    with armed({VARIABLE: "data@rank=1@step=7@generation=2:raise; gradients:nan"}, rank=1):
        reach(Place.DATA, step=7)
        set_generation(2)
        reach(Place.DATA, step=6)
        reach(Place.FORWARD, step=7)
        assert reach(Place.GRADIENTS, step=0)
        with pytest.raises(FailpointError, match="failpoint data"):
            reach(Place.DATA, step=7)
    with armed({VARIABLE: "data@rank=1:raise"}, rank=0):
        reach(Place.DATA)
    reach(Place.DATA)


def test_too_little_memory_is_the_allocators_own_error() -> None:
    with armed({VARIABLE: "forward:oom"}, rank=0), pytest.raises(RuntimeError) as caught:
        reach(Place.FORWARD)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("another"))


def test_a_signal_reaches_this_process(monkeypatch) -> None:
    sent = []
    monkeypatch.setattr("os.kill", lambda process, number: sent.append((process == os.getpid(), int(number))))
    for happening in ("kill", "stop", "terminate"):
        with armed({VARIABLE: f"save:{happening}"}, rank=0):
            reach(Place.SAVE, step=1)
    assert sent == [(True, 9), (True, 19), (True, 15)]
