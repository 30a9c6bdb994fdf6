"""A packed dataset, read.

Owns opening, checking and reading rows of a dataset directory. Knows nothing of frameworks: rows are numpy. The one
decision: files are checked against the manifest when the dataset is opened, so damage is found before training and
with the file's name, never as a strange loss.

Shapes: N rows, T tokens in a row; a row has T + 1 ids, inputs are `[:, :-1]` and targets `[:, 1:]`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.manifest import TOKENIZER_NAME, Manifest
from pipeline.data.order import rank_positions, shuffled_rows
from pipeline.data.shard_file import AGAIN, locate_rows, map_shard
from pipeline.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class PackedDataset:
    """Memory-mapped token rows with random access."""

    directory: Path
    manifest: Manifest
    _shards: dict[str, tuple[npt.NDArray[Any], ...]]
    _first_row: dict[str, npt.NDArray[np.int64]]

    @classmethod
    def open(cls, directory: Path, *, verify: bool = True) -> "PackedDataset":
        """Open a dataset directory; maps the shards, reads no rows.

        Args:
            directory: what `data.text` wrote.
            verify: also compare each file's sha256 (about 1 GB/s); sizes and headers are always compared.

        Raises:
            ArtifactError: a file is missing, truncated or altered; names it.
        """
        manifest = Manifest.read(directory)
        _check_tokenizer(directory, manifest, verify=verify)
        row_shape = (manifest.sequence_length + 1,)
        shards = {
            name: tuple(
                map_shard(directory, shard, row_shape=row_shape, dtype=manifest.dtype, verify=verify)
                for shard in split.shards
            )
            for name, split in manifest.splits.items()
        }
        first_row = {
            name: np.cumsum([0, *(shard.num_rows for shard in split.shards)], dtype=np.int64)
            for name, split in manifest.splits.items()
        }
        return cls(directory=directory, manifest=manifest, _shards=shards, _first_row=first_row)

    @property
    def sequence_length(self) -> int:
        """T, tokens in a training row."""
        return self.manifest.sequence_length

    @property
    def vocabulary_size(self) -> int:
        """Every id is below this."""
        return self.manifest.vocabulary_size

    @property
    def eos_token_id(self) -> int:
        """Id that ends a document."""
        return self.manifest.eos_token_id

    @property
    def tokenizer_path(self) -> Path:
        """The `tokenizer.json`."""
        return self.directory / TOKENIZER_NAME

    def num_rows(self, split: str) -> int:
        """Rows of `train` or `validation`."""
        return self.manifest.splits[split].num_rows

    def rows(self, split: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Rows by index, int32 [N, T + 1].

        Raises:
            IndexError: an index is outside the split.
        """
        indices = np.asarray(indices, dtype=np.int64)
        shard_of, inside = locate_rows(indices, first_row=self._first_row[split], split=split)
        out = np.empty((len(indices), self.sequence_length + 1), dtype=np.int32)
        for place, (shard, row) in enumerate(zip(shard_of, inside, strict=True)):
            out[place] = self._shards[split][shard][row]
        return out

    def train_rows(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> npt.NDArray[np.int32]:
        """What `rank` trains on in optimizer step `step` (from 0), int32 [rows_per_step / world_size, T + 1].

        A pure function of the arguments; the union over ranks does not depend on `world_size`.
        """
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self.rows("train", shuffled_rows(positions, num_rows=self.num_rows("train"), seed=seed))


def _check_tokenizer(directory: Path, manifest: Manifest, *, verify: bool) -> None:
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise ArtifactError(f"{path}: missing", hint=AGAIN)
    if verify and sha256_of(path) != manifest.tokenizer_sha256:
        raise ArtifactError(f"{path}: altered (its sha256 is not the manifest's)", hint=AGAIN)
