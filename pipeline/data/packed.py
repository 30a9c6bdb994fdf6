"""A packed dataset, read.

Owns opening, checking and reading rows of a dataset directory, and where documents begin in them. Knows nothing of
frameworks: rows are numpy. The one decision: files are checked against the manifest before a row of them is read, so
damage is found with the file's name, never as a strange loss.

Shapes: N rows, T tokens in a row, S = T + 1; a row has S ids, inputs are `[:, :-1]` and targets `[:, 1:]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.manifest import TOKENIZER_NAME, Manifest, manifest_digest
from pipeline.data.order import rank_positions, shuffled_rows
from pipeline.data.packed_shards import LocalShards, PackedShards
from pipeline.data.remote_shards import RemoteShards
from pipeline.data.shard_file import AGAIN, locate_rows
from pipeline.data.windowed_order import WindowedOrder
from pipeline.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class PackedDataset:
    """Token rows with random access."""

    directory: Path
    manifest: Manifest
    _shards: PackedShards
    _first_row: Mapping[str, npt.NDArray[np.int64]]

    @classmethod
    def open(
        cls, directory: Path, *, verify: bool = True, workers: int = 1, cache_bytes: int | None = None
    ) -> "PackedDataset":
        """Open a dataset directory; reads no rows.

        Args:
            directory: what `data.text` or `data.stream` wrote.
            verify: also compare each file's sha256 (about 1 GB/s); sizes and headers are always compared, and what
                comes from elsewhere always has its sha256 compared.
            workers: threads that fetch shards which are elsewhere.
            cache_bytes: shards from elsewhere that are kept on this host; as many as are needed at a time, and 4 GiB
                in any case, where it is None.

        Raises:
            ArtifactError: a file is missing, truncated or altered; names it.
            ParameterError: the cache cannot hold what the order needs at a time.
        """
        manifest = Manifest.read(directory)
        _check_tokenizer(directory, manifest, verify=verify)
        first_row = {
            name: np.cumsum([0, *(shard.num_rows for shard in split.shards)], dtype=np.int64)
            for name, split in manifest.splits.items()
        }
        shards: PackedShards
        if manifest.streaming is None:
            shards = LocalShards(directory, manifest, verify=verify)
        else:
            shards = RemoteShards(manifest, manifest.streaming, workers=workers, cache_bytes=cache_bytes)
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

    @property
    def digest(self) -> str:
        """sha256 of what the dataset holds, hexadecimal."""
        return manifest_digest(self.directory)

    @property
    def waiting_for(self) -> str | None:
        """What is being fetched, in words; None where nothing is."""
        return self._shards.waiting_for

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
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            out[chosen] = self._shards.rows(split, int(shard))[inside[chosen]]
        return out

    def positions(self, split: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Place of each token in its document, int32 [N, S]; counts from 0 where a document, or the row, begins.

        Raises:
            IndexError: an index is outside the split.
        """
        indices = np.asarray(indices, dtype=np.int64)
        shard_of, inside = locate_rows(indices, first_row=self._first_row[split], split=split)
        length = self.sequence_length
        begins = np.zeros((len(indices), length + 1), dtype=bool)
        begins[:, 0] = True
        for place, (shard, row) in enumerate(zip(shard_of, inside, strict=True)):
            starts = self._shards.documents(split, int(shard))
            first, last = np.searchsorted(starts, [row * length, (row + 1) * length + 1])
            begins[place, starts[first:last] - row * length] = True
        token = np.arange(length + 1, dtype=np.int32)
        return token - np.maximum.accumulate(np.where(begins, token, 0), axis=1)

    def train_rows(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> npt.NDArray[np.int32]:
        """What `rank` trains on in optimizer step `step` (from 0), int32 [rows_per_step / world_size, S].

        A pure function of the arguments; the union over ranks does not depend on `world_size`. A step that reaches the
        end of an epoch goes on with the first rows of the next one: nothing is dropped or filled up.
        """
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self.rows("train", self.row_at(positions, seed=seed))

    def train_positions(
        self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int
    ) -> npt.NDArray[np.int32]:
        """`positions` of the rows that `train_rows` gives for the same arguments."""
        positions = rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
        return self.positions("train", self.row_at(positions, seed=seed))

    def row_at(self, positions: npt.NDArray[np.int64], *, seed: int) -> npt.NDArray[np.int64]:
        """Training row at each position of the global order, int64 [N]."""
        streaming = self.manifest.streaming
        if streaming is None:
            return shuffled_rows(positions, num_rows=self.num_rows("train"), seed=seed)
        order = WindowedOrder(
            shard_rows=[shard.num_rows for shard in self.manifest.splits["train"].shards],
            shuffled_shards=streaming.shuffled_shards,
            seed=seed,
        )
        if len(positions):
            self._shards.read_ahead("train", order.shards_near(int(positions[-1]))[1])
        return order.rows(positions)

    def step_rows(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), as `train`."""
        positions = rank_positions(step, rows_per_step=rows_per_step)
        return {"train": self.row_at(positions, seed=seed).tolist()}

    def epochs(self, step: int, *, rows_per_step: int, seed: int) -> Mapping[str, float]:
        """Passes over the training rows after `step` steps."""
        return {"epoch": step * rows_per_step / self.num_rows("train")}


def _check_tokenizer(directory: Path, manifest: Manifest, *, verify: bool) -> None:
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise ArtifactError(f"{path}: missing", hint=AGAIN)
    if verify and sha256_of(path) != manifest.tokenizer_sha256:
        raise ArtifactError(f"{path}: altered (its sha256 is not the manifest's)", hint=AGAIN)
