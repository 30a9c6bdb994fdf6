"""A dataset directory of any kind, opened.

Owns the choice by what the manifest says, and the reading ahead of training. The one decision: a dataset says itself
what it holds, so a stage takes the artifact type `dataset` and decides when it opens it.
"""

from pathlib import Path

from pipeline.data.array_manifest import ARRAYS
from pipeline.data.arrays import ArrayDataset
from pipeline.data.manifest import read_raw_manifest
from pipeline.data.mixture import MIXTURE, MixtureDataset
from pipeline.data.packed import PackedDataset
from pipeline.data.read_ahead import ReadAhead
from pipeline.errors import ArtifactError

TokenDataset = PackedDataset | MixtureDataset


def open_dataset(
    directory: Path, *, verify: bool = True, workers: int = 1, cache_bytes: int | None = None
) -> TokenDataset | ArrayDataset:
    """Rows of tokens, or examples of named arrays.

    Args:
        directory: what a stage of data wrote.
        verify: also compare each file's sha256.
        workers: threads that fetch shards which are elsewhere.
        cache_bytes: shards from elsewhere that are kept on this host; what is needed at a time, and 4 GiB in any case,
            where it is None.

    Raises:
        ArtifactError: a file is missing, truncated or altered; names it.
        ParameterError: the cache cannot hold what the order needs at a time.
    """
    kind = read_raw_manifest(directory).get("kind")
    if kind == ARRAYS:
        return ArrayDataset.open(directory, verify=verify)
    opened = MixtureDataset if kind == MIXTURE else PackedDataset
    return opened.open(directory, verify=verify, workers=workers, cache_bytes=cache_bytes)


def open_tokens(directory: Path) -> TokenDataset:
    """Rows of tokens; errors as `open_dataset`, and where it holds arrays."""
    dataset = open_dataset(directory)
    if isinstance(dataset, ArrayDataset):
        raise ArtifactError(
            f"{directory}: a dataset of {ARRAYS}, and rows of tokens are wanted",
            hint="use the output of `data.text` here",
        )
    return dataset


def open_for_training(directory: Path, *, positions: bool, workers: int, cache_bytes: int) -> ReadAhead:
    """What a rank trains on, read `workers` steps ahead; files were checked before.

    Args:
        directory: what a stage of data wrote.
        positions: where documents begin is wanted too.
        workers: threads that read ahead, and as many that fetch shards.
        cache_bytes: shards from elsewhere that are kept on this host.

    Raises:
        ArtifactError: a file is missing or truncated; names it.
    """
    dataset = open_dataset(directory, verify=False, workers=workers, cache_bytes=cache_bytes)
    return ReadAhead(dataset, workers=workers, positions=positions)
