"""What this process was asked to do at the next step boundary.

Owns the box of requests, and the signals that put something into it. Knows nothing of ranks: what one process was asked
becomes everybody's through `agreement.py`. The one decision: a signal handler or a watching thread only leaves a note;
the loop acts on it where the state is whole.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from types import FrameType
from typing import Any


class Flag(IntFlag):
    """Bits of the agreement word."""

    STOP = 1
    """Commit and end, as a user who interrupts wants it."""
    PREEMPT = 2
    """Commit and end, because the machine is taken away; training resumes elsewhere or later."""
    SAVE = 4
    """Commit and go on."""
    NON_FINITE = 8
    """The gradient norm of the step before was not finite."""


ENDING = Flag.STOP | Flag.PREEMPT
_ASKABLE = Flag.STOP | Flag.PREEMPT | Flag.SAVE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    reason: str
    asked_at: float


_box: dict[Flag, _Request] = {}
"""Changed by single operations of the dictionary only: a signal handler may come between any two."""


def ask(flag: Flag, *, reason: str) -> None:
    """Ask this rank, and so the whole gang, for something; from any thread, also before training starts.

    Args:
        flag: `STOP`, `PREEMPT` or `SAVE`.
        reason: who asks, for the error and the notes: `SIGTERM`, `node 10.0.0.7 is drained`.
    """
    if flag not in (Flag.STOP, Flag.PREEMPT, Flag.SAVE):
        raise ValueError(f"{flag!r} cannot be asked for")
    _box.setdefault(flag, _Request(reason=reason, asked_at=time.monotonic()))


def asked() -> Flag:
    """Everything that is asked for now."""
    flags = Flag(0)
    for flag in tuple(_box):
        flags |= flag
    return flags


def reason_of(flag: Flag) -> str:
    """Who asked this process; empty where another rank was asked."""
    found = _box.get(flag)
    return "" if found is None else found.reason


def answered(flags: Flag) -> None:
    """Take requests out of the box that were fulfilled."""
    for flag in flags:
        _box.pop(flag, None)


def preempted_for_seconds() -> float | None:
    """Time since this process was asked to make way; None where it was not."""
    found = _box.get(Flag.PREEMPT)
    return None if found is None else time.monotonic() - found.asked_at


def listen(signals: Sequence[str]) -> dict[int, Any]:
    """Take signals as requests from now on; called in the main thread. What was done with each before.

    `INT` asks to stop, every other signal to make way.
    """
    wanted = [signal.Signals[f"SIG{name}"] for name in signals]
    return {number: signal.signal(number, _take) for number in wanted}


@contextlib.contextmanager
def listening(signals: Sequence[str]) -> Iterator[None]:
    """Take signals (`TERM`, `USR1`, ...) as requests while training runs; the box is empty afterwards.

    Outside the main thread (a Ray Train worker) Python takes no signals; there the launcher calls `listen` in it.
    """
    before = listen(signals) if threading.current_thread() is threading.main_thread() else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        answered(_ASKABLE)


def _take(number: int, frame: FrameType | None) -> None:
    ask(Flag.STOP if number == signal.SIGINT else Flag.PREEMPT, reason=signal.Signals(number).name)
