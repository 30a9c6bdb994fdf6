"""Reading ahead: the same rows, earlier; what fails or is stuck is named."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from pipeline.data.read_ahead import ReadAhead
from pipeline.errors import ArtifactError, StoreError

ASKED = {"rows_per_step": 4, "rank": 1, "world_size": 2, "seed": 0}
READ_SECONDS = 0.1
WAIT_SECONDS = 30.0


class SlowRows:
    """Rows that say which step they are of."""

    waiting_for = "shard train-00003.npy"

    def __init__(self, *, seconds: float = 0.0, broken: int | None = None) -> None:
        self._seconds, self._broken = seconds, broken
        self.asked: list[tuple[str, int]] = []
        self.read: list[int] = []

    def _read(self, method: str, step: int) -> np.ndarray:
        self.asked.append((method, step))
        time.sleep(self._seconds)
        if step == self._broken:
            raise ArtifactError("shard train-00003.npy: altered", hint="look at it")
        self.read.append(step)
        return np.full(3, step)

    def train_rows(self, step: int, **_: Any) -> np.ndarray:
        return self._read("rows", step)

    def train_positions(self, step: int, **_: Any) -> np.ndarray:
        return -self._read("positions", step)


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_those_of_the_step_whatever_is_read_ahead(workers: int) -> None:
    ahead = ReadAhead(SlowRows(), workers=workers, positions=True)
    for step in (0, 1, 2, 7, 3, 4):  # a resume goes elsewhere
        assert ahead.train_rows(step, **ASKED)[0] == step
        assert ahead.train_positions(step, **ASKED)[0] == -step


def test_the_next_rows_are_read_while_a_step_computes() -> None:
    rows = SlowRows(seconds=READ_SECONDS)
    ahead = ReadAhead(rows, workers=1)
    ahead.train_rows(0, **ASKED)
    for step in (1, 2):
        deadline = time.monotonic() + WAIT_SECONDS
        while step not in rows.read:  # the step computes, and nobody asks for the next one
            assert time.monotonic() < deadline, rows.asked
            time.sleep(READ_SECONDS / 10)
        assert ahead.train_rows(step, **ASKED)[0] == step
    assert [step for _, step in rows.asked[:3]] == [0, 1, 2]


def test_what_fails_is_told_when_its_step_is_due_with_rank_and_step() -> None:
    ahead = ReadAhead(SlowRows(broken=2), workers=2)
    ahead.train_rows(0, **ASKED)
    ahead.train_rows(1, **ASKED)
    with pytest.raises(ArtifactError, match=r"rank 1, rows of step 3: shard train-00003\.npy: altered") as raised:
        ahead.train_rows(2, **ASKED)
    assert raised.value.hint == "look at it"


def test_a_read_that_does_not_end_is_an_error_that_says_what_is_read() -> None:
    held = threading.Event()

    class Stuck(SlowRows):
        def train_rows(self, step: int, **_: Any) -> np.ndarray:
            held.wait(10)
            return super().train_rows(step)

    ahead = ReadAhead(Stuck(), workers=1, timeout_seconds=0.1)
    with pytest.raises(StoreError, match=r"rank 1, rows of step 1: still reading shard train-00003\.npy after 0\.1 s"):
        ahead.train_rows(0, **ASKED)
    held.set()
