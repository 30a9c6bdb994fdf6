"""A dataset directory of either kind, opened.

Owns the choice by what the manifest says. The one decision: a dataset says itself what it holds, so a stage takes the
artifact type `dataset` and decides when it opens it.
"""

from pathlib import Path

from pipeline.data.array_manifest import ARRAYS
from pipeline.data.arrays import ArrayDataset
from pipeline.data.manifest import read_raw_manifest
from pipeline.data.packed import PackedDataset


def open_dataset(directory: Path, *, verify: bool = True) -> PackedDataset | ArrayDataset:
    """Rows of tokens, or examples of named arrays.

    Raises:
        ArtifactError: a file is missing, truncated or altered; names it.
    """
    is_arrays = read_raw_manifest(directory).get("kind") == ARRAYS
    return (ArrayDataset if is_arrays else PackedDataset).open(directory, verify=verify)
