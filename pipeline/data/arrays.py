"""A dataset of named arrays, read.

Owns opening, checking and reading examples of a dataset directory. Knows nothing of frameworks: examples are numpy. The
one decision: it answers like a packed text dataset does, by split and row or by step, so the order of training and what
resuming needs are the same for both.

Shapes: N examples; an array is [N, *shape of one example].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.array_manifest import ArrayManifest, ArraySpec
from pipeline.data.manifest import manifest_digest
from pipeline.data.order import rank_positions, shuffled_rows
from pipeline.data.shard_file import locate_rows, map_shard

Shards = Mapping[str, tuple[npt.NDArray[Any], ...]]


@dataclass(frozen=True, kw_only=True)
class ArrayDataset:
    """Memory-mapped examples with random access."""

    directory: Path
    manifest: ArrayManifest
    _shards: Mapping[str, Shards]
    _first_row: Mapping[str, npt.NDArray[np.int64]]

    @classmethod
    def open(cls, directory: Path, *, verify: bool = True) -> "ArrayDataset":
        """Open a dataset directory; maps the shards, reads no examples.

        Args:
            directory: what `data.arrays` wrote.
            verify: also compare each file's sha256; sizes and headers are always compared.

        Raises:
            ArtifactError: a file is missing, truncated or altered; names it.
        """
        manifest = ArrayManifest.read(directory)
        shards: dict[str, Shards] = {}
        first_row = {}
        for name, split in manifest.splits.items():
            shards[name] = {
                array: tuple(
                    map_shard(directory, entry, row_shape=spec.shape, dtype=spec.dtype, verify=verify)
                    for entry in split.shards[array]
                )
                for array, spec in manifest.arrays.items()
            }
            sizes = [entry.num_rows for entry in split.shards[manifest.target]]
            first_row[name] = np.cumsum([0, *sizes], dtype=np.int64)
        return cls(directory=directory, manifest=manifest, _shards=shards, _first_row=first_row)

    @property
    def digest(self) -> str:
        """sha256 of what the dataset holds, hexadecimal."""
        return manifest_digest(self.directory)

    @property
    def waiting_for(self) -> str | None:
        """Nothing is ever fetched."""
        return None

    @property
    def inputs(self) -> dict[str, ArraySpec]:
        """What a model is given, by keyword of its `forward`."""
        return {name: spec for name, spec in self.manifest.arrays.items() if name != self.manifest.target}

    @property
    def target(self) -> str:
        """Name of the array that is predicted."""
        return self.manifest.target

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one example's target."""
        return self.manifest.arrays[self.manifest.target].shape

    @property
    def num_classes(self) -> int | None:
        """Where the target is a class, how many there are; None where it is a value."""
        return self.manifest.num_classes

    def num_rows(self, split: str) -> int:
        """Examples of `train` or `validation`."""
        return self.manifest.splits[split].num_rows

    def rows(self, split: str, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Examples by index: every array, `[N, *shape]` in its own dtype.

        Raises:
            IndexError: an index is outside the split.
        """
        indices = np.asarray(indices, dtype=np.int64)
        shard_of, inside = locate_rows(indices, first_row=self._first_row[split], split=split)
        examples = {}
        for name, spec in self.manifest.arrays.items():
            out = np.empty((len(indices), *spec.shape), dtype=spec.dtype)
            for shard in np.unique(shard_of):
                chosen = shard_of == shard
                out[chosen] = self._shards[split][name][shard][inside[chosen]]
            examples[name] = out
        return examples

    def train_rows(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> dict[str, npt.NDArray[Any]]:
        """What `rank` trains on in optimizer step `step` (from 0): rows_per_step / world_size examples.

        A pure function of the arguments; the union over ranks does not depend on `world_size`.
        """
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self.rows("train", shuffled_rows(positions, num_rows=self.num_rows("train"), seed=seed))

    def step_rows(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), as `train`."""
        positions = rank_positions(step, rows_per_step=rows_per_step)
        return {"train": shuffled_rows(positions, num_rows=self.num_rows("train"), seed=seed).tolist()}

    def epochs(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, float]:
        """Passes over the training examples after `step` steps."""
        return {"epoch": step * rows_per_step / self.num_rows("train")}
