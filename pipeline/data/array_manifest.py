"""What a dataset of arrays says of itself.

Owns the shape of its `manifest.json` and its reading. Knows nothing of how it was made. The one decision: one array is
the target and every other array is an input of the model by its own name, so a dataset fits a model exactly when the
model's `forward` takes those names.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.data.manifest import AGAIN, MANIFEST_NAME, ShardEntry, read_raw_manifest
from pipeline.errors import ArtifactError

ARRAYS = "arrays"
"""The manifest's `kind`; a packed text dataset has none."""
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One named array."""

    shape: tuple[int, ...]
    """Of one example."""
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySplit:
    """`train` or `validation`."""

    num_rows: int
    """Examples."""
    shards: Mapping[str, tuple[ShardEntry, ...]]
    """By array name; all arrays are cut at the same examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayManifest:
    """The whole of `manifest.json`."""

    arrays: Mapping[str, ArraySpec]
    target: str
    """Name of the array that is predicted."""
    target_kind: Literal["classes", "values"]
    num_classes: int | None
    """Where the target is a class: one more than the largest of all examples."""
    seed: int
    splits: Mapping[str, ArraySplit]
    source: Mapping[str, Any]
    kind: str = ARRAYS
    schema: int = SCHEMA

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "ArrayManifest":
        """Read `manifest.json` of a dataset directory.

        Raises:
            ArtifactError: it is missing, damaged, of another schema, or of a dataset that holds no arrays.
        """
        path = directory / MANIFEST_NAME
        raw = read_raw_manifest(directory)
        if raw.get("kind") != ARRAYS:
            raise ArtifactError(f"{path}: this dataset holds no arrays", hint="`data.arrays` makes such a dataset")
        if raw.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path}: dataset schema {raw.get('schema')!r}, this version reads {SCHEMA}", hint=AGAIN
            )
        try:
            arrays = {
                name: ArraySpec(shape=tuple(int(size) for size in spec["shape"]), dtype=str(spec["dtype"]))
                for name, spec in raw.pop("arrays").items()
            }
            splits = {
                name: ArraySplit(
                    num_rows=int(split["num_rows"]),
                    shards={
                        array: tuple(ShardEntry(**shard) for shard in shards)
                        for array, shards in split["shards"].items()
                    },
                )
                for name, split in raw.pop("splits").items()
            }
            manifest = cls(arrays=arrays, splits=splits, **raw)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error})", hint=AGAIN) from error
        if manifest.target not in arrays or any(split.shards.keys() != arrays.keys() for split in splits.values()):
            raise ArtifactError(f"{path}: damaged (its arrays, its target and its shards do not agree)", hint=AGAIN)
        return manifest
