"""Places where a test makes training fail.

Owns the names of the places, what can happen there, and the text that arms them. Knows nothing of steps beyond their
number. The one decision: nothing is armed unless the environment says so, and then a place costs one look at an empty
tuple (measured: 0.12 us of CPU).

`PIPELINE_FAILPOINTS="gradients@rank=1@step=7:nan; data@generation=1:hang"` arms two. Conditions after `@` must all hold
where they are given: `rank`, `step` (from 0), `generation` (start of training in its workspace, from 1).
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from pipeline.errors import UsageError, nearest_name

VARIABLE = "PIPELINE_FAILPOINTS"


class Place(StrEnum):
    """Where something can be made to fail."""

    DATA = "data"
    """Before a rank reads the rows of a step."""
    FORWARD = "forward"
    """Before forward and backward of a step."""
    GRADIENTS = "gradients"
    """After the backward pass; the only place of `nan`."""
    UPDATE = "update"
    """Before the optimizer's step."""
    STEP_DONE = "step_done"
    """After a step, before what it owes (reports, checkpoints)."""
    VALIDATION = "validation"
    """Before each forward pass of a validation."""
    SAVE = "save"
    """Before a checkpoint's first byte; `step` counts the steps done."""
    SAVE_VOTE = "save_vote"
    """The shards are written, the vote is not."""
    SAVE_COMMIT = "save_commit"
    """All votes are given, nothing is committed."""
    LOAD = "load"
    """Before a checkpoint is read."""


class Happening(StrEnum):
    """What happens at an armed place."""

    KILL = "kill"
    """SIGKILL to this rank."""
    STOP = "stop"
    """SIGSTOP to this rank: alive, and silent."""
    TERMINATE = "terminate"
    """SIGTERM to this rank, as a preemption sends it."""
    RAISE = "raise"
    """An exception that training does not know."""
    HANG = "hang"
    """Never go on."""
    NAN = "nan"
    """The caller makes a gradient not a number."""
    OUT_OF_MEMORY = "oom"
    """Ask the allocator for more than any machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failpoint:
    """One armed place."""

    place: Place
    happening: Happening
    rank: int | None = None
    step: int | None = None
    generation: int | None = None

    def holds(self, place: Place, *, rank: int, step: int | None, generation: int) -> bool:
        """True where this is the place and every condition holds."""
        found = {"rank": rank, "step": step, "generation": generation}
        return self.place is place and all(
            wanted is None or found[name] == wanted
            for name, wanted in (("rank", self.rank), ("step", self.step), ("generation", self.generation))
        )


class FailpointError(Exception):
    """What an armed place raises."""


_UNLIKELY_BYTES = 2**50
_armed: tuple[Failpoint, ...] = ()
_where = (0, 1)
"""Rank and generation of this process."""


@contextlib.contextmanager
def armed(environment: Mapping[str, str], *, rank: int) -> Iterator[None]:
    """Arm what the environment says, or nothing, while the block runs.

    Raises:
        UsageError: the text is wrong; every problem at once.
    """
    global _armed, _where
    _armed, _where = parse(environment.get(VARIABLE, "")), (rank, 1)
    try:
        yield
    finally:
        _armed = ()


def set_generation(generation: int) -> None:
    """Say which start of training this process belongs to."""
    global _where
    _where = (_where[0], generation)


def reach(place: Place, *, step: int | None = None) -> bool:
    """Stand at a place; True where the caller has to make its gradient not a number.

    Raises:
        FailpointError: it is armed with `raise`.
        RuntimeError: it is armed with `oom`; the allocator's own.
    """
    if not _armed:
        return False
    rank, generation = _where
    for point in _armed:
        if point.holds(place, rank=rank, step=step, generation=generation):
            if point.happening is Happening.NAN:
                return True
            _happen(point)
    return False


def parse(text: str) -> tuple[Failpoint, ...]:
    """The failpoints of a text; see the head of this file.

    Raises:
        UsageError: a name, a condition or a happening is unknown.
    """
    found, problems = [], []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        head, _, happening = item.partition(":")
        name, *conditions = head.split("@")
        values = {}
        for condition in conditions:
            match = re.fullmatch(r"(rank|step|generation)=(\d+)", condition)
            if match is None:
                problems.append(f"{item!r}: condition {condition!r} is none of rank=N, step=N, generation=N")
            else:
                values[match[1]] = int(match[2])
        problems += _unknown(item, "place", name, [place.value for place in Place])
        problems += _unknown(item, "happening", happening, [one.value for one in Happening])
        if not problems:
            found.append(Failpoint(place=Place(name), happening=Happening(happening), **values))
    if problems:
        raise UsageError(
            f"{VARIABLE}: " + "; ".join(problems),
            hint="write NAME@rank=N@step=N@generation=N:HAPPENING, several with `;` between",
        )
    return tuple(found)


def _unknown(item: str, what: str, given: str, allowed: list[str]) -> list[str]:
    if given in allowed:
        return []
    guess = nearest_name(given, allowed)
    return [f"{item!r}: unknown {what} {given!r}; allowed: {', '.join(allowed)}" + (f"; {guess!r}?" if guess else "")]


def _happen(point: Failpoint) -> None:
    match point.happening:
        case Happening.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Happening.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Happening.TERMINATE:
            os.kill(os.getpid(), signal.SIGTERM)
        case Happening.RAISE:
            raise FailpointError(f"failpoint {point.place.value}")
        case Happening.HANG:
            while True:
                time.sleep(3600)
        case Happening.OUT_OF_MEMORY:
            torch.empty(_UNLIKELY_BYTES, dtype=torch.uint8)
