"""The shards of a packed dataset, wherever they lie.

Owns the seam between rows and files, and the source whose files lie beside the manifest. Knows nothing of orders or
rows. The one decision: a shard is asked for by its number when a row of it is wanted, so the same dataset reads files
that are mapped for good and files that come and go in a bounded cache.

Shapes: N rows of the shard, T tokens in a row, D documents that begin in it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.manifest import Manifest, ShardEntry
from pipeline.data.shard_file import map_shard

DOCUMENTS_DTYPE = "int64"


class PackedShards(Protocol):
    """Where rows come from."""

    @property
    def waiting_for(self) -> str | None:
        """What is being fetched, in words; None where nothing is."""
        ...

    def rows(self, split: str, number: int) -> npt.NDArray[Any]:
        """Rows of a shard, [N, T + 1] in the dataset's dtype.

        Raises:
            ArtifactError: it cannot be read, or is damaged; names it.
        """
        ...

    def documents(self, split: str, number: int) -> npt.NDArray[np.int64]:
        """Where documents begin, in tokens after the first of the shard, int64 [D]; errors as `rows`."""
        ...

    def read_ahead(self, split: str, numbers: Sequence[int]) -> None:
        """These shards are wanted soon."""
        ...


class LocalShards:
    """Files beside the manifest, mapped and checked when the dataset is opened."""

    waiting_for: str | None = None

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool) -> None:
        """Map every file.

        Raises:
            ArtifactError: one is missing, truncated or altered; names it.
        """
        self._rows: Mapping[str, list[npt.NDArray[Any]]] = {
            name: [map_rows(directory, shard, manifest=manifest, verify=verify) for shard in split.shards]
            for name, split in manifest.splits.items()
        }
        self._documents: Mapping[str, list[npt.NDArray[np.int64]]] = {
            name: [map_documents(directory, entry, verify=verify) for entry in split.documents]
            for name, split in manifest.splits.items()
        }

    def rows(self, split: str, number: int) -> npt.NDArray[Any]:
        """See `PackedShards`."""
        return self._rows[split][number]

    def documents(self, split: str, number: int) -> npt.NDArray[np.int64]:
        """See `PackedShards`."""
        return self._documents[split][number]

    def read_ahead(self, split: str, numbers: Sequence[int]) -> None:
        """Nothing; the pages of a mapped file come when they are read."""


def map_rows(directory: Path, shard: ShardEntry, *, manifest: Manifest, verify: bool) -> npt.NDArray[Any]:
    """A file of rows, [N, T + 1]; errors as `map_shard`."""
    return map_shard(directory, shard, row_shape=(manifest.sequence_length + 1,), dtype=manifest.dtype, verify=verify)


def map_documents(directory: Path, entry: ShardEntry, *, verify: bool) -> npt.NDArray[np.int64]:
    """A file of beginnings, int64 [D]; errors as `map_shard`."""
    return map_shard(directory, entry, row_shape=(), dtype=DOCUMENTS_DTYPE, verify=verify)
