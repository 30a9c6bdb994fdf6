"""The `.npy` files of a dataset, checked and mapped.

Owns the checks between a file and its manifest entry, and which file holds which row. Knows nothing of what the rows
mean. The one decision: a file is mapped, not read, and is refused with its name when size, digest, shape or dtype are
not those of the manifest.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.manifest import ShardEntry
from pipeline.errors import ArtifactError

AGAIN = "the dataset is damaged; delete it and run the data stage again"


def map_shard(
    directory: Path, shard: ShardEntry, *, row_shape: tuple[int, ...], dtype: str, verify: bool
) -> npt.NDArray[Any]:
    """The shard's rows, `[num_rows, *row_shape]`, mapped read only.

    Args:
        directory: of the dataset.
        shard: what the manifest says.
        row_shape: of one row.
        dtype: of the file.
        verify: also compare its sha256.

    Raises:
        ArtifactError: the file is missing, truncated or altered.
    """
    path = directory / shard.file
    if not path.is_file():
        raise ArtifactError(f"{path}: missing", hint=AGAIN)
    size = path.stat().st_size
    if size != shard.num_bytes:
        raise ArtifactError(f"{path}: {size} bytes, the manifest says {shard.num_bytes}", hint=AGAIN)
    if verify and sha256_of(path) != shard.sha256:
        raise ArtifactError(f"{path}: altered (its sha256 is not the manifest's)", hint=AGAIN)
    try:
        rows: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ArtifactError(f"{path}: cannot be read as an array: {error}", hint=AGAIN) from error
    expected = (shard.num_rows, *row_shape)
    if rows.shape != expected or rows.dtype.name != dtype:
        raise ArtifactError(f"{path}: {rows.dtype.name} {rows.shape}, the manifest says {dtype} {expected}", hint=AGAIN)
    return rows


def locate_rows(
    indices: npt.NDArray[np.int64], *, first_row: npt.NDArray[np.int64], split: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shard of each row, and the row's place in it, int64 [N] each.

    Args:
        indices: rows of the split, [N].
        first_row: of each shard, and the number of rows after the last.
        split: its name, for the error.

    Raises:
        IndexError: an index is outside the split.
    """
    if len(indices) and (indices.min() < 0 or indices.max() >= first_row[-1]):
        raise IndexError(f"rows of {split!r} are 0 to {first_row[-1] - 1}, asked {indices.min()} to {indices.max()}")
    shard_of = np.searchsorted(first_row, indices, side="right") - 1
    return shard_of, indices - first_row[shard_of]


def write_shard(path: Path, rows: npt.NDArray[Any]) -> ShardEntry:
    """Write `rows` as one `.npy` file; its manifest entry."""
    np.save(path, np.ascontiguousarray(rows), allow_pickle=False)
    return ShardEntry(file=path.name, num_rows=len(rows), num_bytes=path.stat().st_size, sha256=sha256_of(path))
