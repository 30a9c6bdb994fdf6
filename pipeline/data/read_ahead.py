"""Rows of the next steps, read while this one computes.

Owns the reading ahead of any dataset that answers by step, and the deadline of a read. Knows nothing of files. The one
decision: it stands where the dataset stands and asks it the same questions earlier, so rows are the same whatever the
number of workers, and one that stops or resumes needs nothing else.
"""

import functools
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.background import Background
from pipeline.errors import PipelineError, StoreError

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question to a dataset."""

    method: str
    step: int
    rows_per_step: int
    rank: int
    world_size: int
    seed: int


class ReadAhead:
    """A dataset of training that is asked for the next steps before they are due."""

    def __init__(
        self, dataset: Any, *, workers: int, positions: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: `PackedDataset`, `MixtureDataset` or `ArrayDataset`.
            workers: steps that are read ahead, each by a thread of its own.
            positions: `train_positions` will be asked too.
            timeout_seconds: a read that takes longer is an error.
        """
        self._dataset = dataset
        self._workers, self._timeout_seconds = workers, timeout_seconds
        self._methods = ("train_rows", "train_positions") if positions else ("train_rows",)
        self._threads = Background(name="rows", workers=workers)
        self._owed: dict[_Asked, Future[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def train_rows(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> Any:
        """What the dataset gives.

        Raises:
            PipelineError: a read fails; of the class that the dataset raised, with rank and step.
            StoreError: it takes too long; names rank, step and what is read.
        """
        return self._take(_Asked("train_rows", step, rows_per_step, rank, world_size, seed))

    def train_positions(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> Any:
        """What the dataset gives; errors as `train_rows`."""
        return self._take(_Asked("train_positions", step, rows_per_step, rank, world_size, seed))

    def _take(self, asked: _Asked) -> Any:
        wanted = [
            replace(asked, method=method, step=asked.step + later)
            for later in range(self._workers + 1)
            for method in self._methods
        ]
        # What is owed for other steps is of no use: training went somewhere else.
        self._owed = {key: owed for key, owed in self._owed.items() if key in wanted}
        for key in wanted:
            if key not in self._owed and (key.step > asked.step or key == asked):
                self._owed[key] = self._threads.submit(functools.partial(self._read, key))
        where = f"rank {asked.rank}, rows of step {asked.step + 1}"
        try:
            return self._owed.pop(asked).result(self._timeout_seconds)
        except LateError:
            reading = getattr(self._dataset, "waiting_for", None) or "the dataset"
            raise StoreError(
                f"{where}: still reading {reading} after {self._timeout_seconds:g} s",
                hint="look whether the store answers; training resumes from its last checkpoint",
            ) from None
        except PipelineError as error:
            raise type(error)(f"{where}: {error.message}", hint=error.hint) from error

    def _read(self, asked: _Asked) -> Any:
        return getattr(self._dataset, asked.method)(
            asked.step,
            rows_per_step=asked.rows_per_step,
            rank=asked.rank,
            world_size=asked.world_size,
            seed=asked.seed,
        )
