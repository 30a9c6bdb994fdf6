"""What training asks of a dataset.

Owns the seam between training and data. Knows nothing of files. The one decision: the dataset answers by step, so the
position in the data is the step itself and resuming needs nothing else.

Shapes: T tokens in a row; rows are int32 [rows, T + 1], inputs `[:, :-1]` and targets `[:, 1:]`. Examples are arrays by
name, each [rows, *shape of one example].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class TokenRows(Protocol):
    """A packed token dataset; `pipeline.data.packed.PackedDataset` is one."""

    @property
    def digest(self) -> str:
        """sha256 of what the dataset holds, hexadecimal."""
        ...

    @property
    def waiting_for(self) -> str | None:
        """What is being fetched, in words; None where nothing is."""
        ...

    @property
    def sequence_length(self) -> int:
        """T."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def tokenizer_path(self) -> Path:
        """The `tokenizer.json`, kept with every checkpoint."""
        ...

    def num_rows(self, split: str) -> int:
        """Rows of `train` or `validation`."""
        ...

    def rows(self, split: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Rows by index, int32 [N, T + 1]."""
        ...

    def positions(self, split: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Place of each token in its document, int32 [N, T + 1]; counts from 0 where a document, or the row, begins."""
        ...

    def train_rows(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> npt.NDArray[np.int32]:
        """What a rank trains on in optimizer step `step` (from 0), int32 [rows_per_step / world_size, T + 1]."""
        ...

    def train_positions(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> npt.NDArray[np.int32]:
        """`positions` of the rows that `train_rows` gives for the same arguments."""
        ...

    def step_rows(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), by the name of what they are rows of."""
        ...

    def epochs(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, float]:
        """Passes over the training rows after `step` steps: `epoch`, or `epoch_NAME` of each dataset of a mixture."""
        ...


Examples = Mapping[str, npt.NDArray[Any]]


class ArraySpec(Protocol):
    """One named array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        ...

    @property
    def dtype(self) -> str:
        """By numpy's name."""
        ...


class ArrayRows(Protocol):
    """A dataset of named arrays; `pipeline.data.arrays.ArrayDataset` is one."""

    @property
    def digest(self) -> str:
        """sha256 of what the dataset holds, hexadecimal."""
        ...

    @property
    def waiting_for(self) -> str | None:
        """What is being fetched, in words; None where nothing is."""
        ...

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        """What a model is given, by keyword of its `forward`."""
        ...

    @property
    def target(self) -> str:
        """Name of the array that is predicted."""
        ...

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one example's target."""
        ...

    @property
    def num_classes(self) -> int | None:
        """Where the target is a class, how many there are; None where it is a value."""
        ...

    def num_rows(self, split: str) -> int:
        """Examples of `train` or `validation`."""
        ...

    def rows(self, split: str, indices: npt.NDArray[np.int64]) -> Examples:
        """Examples by index."""
        ...

    def train_rows(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> Examples:
        """What a rank trains on in optimizer step `step` (from 0), rows_per_step / world_size examples."""
        ...

    def step_rows(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), by the name of what they are rows of."""
        ...

    def epochs(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, float]:
        """Passes over the training examples after `step` steps, as `epoch`."""
        ...
