"""Parameters of an Orbax checkpoint: headers first, leaves one by one.

Owns the reading of `params/` in bounded memory. Knows nothing of models, devices or conversion rules. The one decision:
TensorStore itself reads, for two reasons: the sharding of the machine that wrote need not exist here, and Orbax, when
it fails, leaves hundreds of reads behind that print to stderr after its event loop is closed.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from numpy.typing import NDArray

from pipeline.errors import ArtifactError
from pipeline.models import heap
from pipeline.models.parameter_writer import AnnouncedLeaf

Array = NDArray[Any]
Index = tuple[slice, ...]
"""A stretch of each dimension, with its start and stop."""

READ_AHEAD_BYTES = 64 * 2**20
"""Held for leaves that are being read while one is used, unless a single one needs more."""
_READING_COPIES = 2
"""A leaf is held as decoded and as given, in turns as encoded and as decoded."""

# What TensorStore raises on files that are missing or cut, found by damaging each file of a checkpoint.
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


class StoredParameters:
    """An Orbax checkpoint that is open for reading; holds headers, no leaves."""

    def __init__(self, directory: Path, stores: Mapping[str, Any]) -> None:
        self._directory = directory
        self._stores = stores
        self.headers: Mapping[str, AnnouncedLeaf] = {
            path: AnnouncedLeaf(tuple(store.shape), store.dtype.numpy_dtype) for path, store in stores.items()
        }
        """Shape and dtype of every leaf by dotted path."""

    @classmethod
    def open(cls, directory: Path) -> "StoredParameters":
        """Open the Orbax checkpoint `directory`, whatever device layout it was saved from.

        Raises:
            ArtifactError: the directory is missing, truncated or altered.
        """
        if not directory.is_dir():
            raise ArtifactError(f"{directory}: no such directory", hint="a Flax model's parameters are under params/")
        try:
            stores = _open_stores(directory.resolve())
        except _READ_ERRORS as error:
            raise _damaged(directory, error) from error
        if not stores:
            raise ArtifactError(f"{directory}: the Orbax checkpoint holds no parameters")
        return cls(directory, stores)

    def read(self, path: str) -> Array:
        """The whole leaf at `path`.

        Raises:
            ArtifactError: a file is missing, truncated or altered.
        """
        return next(self.read_each((path,)))[1]

    def read_each(self, paths: Iterable[str]) -> Iterator[tuple[str, Array]]:
        """The leaves at `paths` in that order, the next ones being read while one is used.

        Raises:
            ArtifactError: a file is missing, truncated or altered.
        """
        return self.read_stretches((path, tuple(map(slice, self.headers[path].shape))) for path in paths)

    def read_stretches(self, wanted: Iterable[tuple[str, Index]]) -> Iterator[tuple[str, Array]]:
        """As `read_each`, of each leaf the stretch of every dimension that `wanted` has beside its path.

        Only chunks that hold some of it are read.

        Raises:
            ArtifactError: a file is missing, truncated or altered.
        """
        reading: deque[tuple[str, Any, int]] = deque()
        held = 0
        try:
            for path, index in wanted:
                part = self._stores[path][index]
                num_bytes = _READING_COPIES * math.prod(part.shape) * self.headers[path].dtype.itemsize
                while reading and held + num_bytes > READ_AHEAD_BYTES:
                    held -= reading[0][2]
                    yield self._taken(reading)
                    heap.give_back()
                reading.append((path, part.read(), num_bytes))
                held += num_bytes
            while reading:
                yield self._taken(reading)
        finally:
            for _, read, _ in reading:
                read.cancel()
            heap.give_back()

    def _taken(self, reading: deque[tuple[str, Any, int]]) -> tuple[str, Array]:
        path, read, _ = reading.popleft()
        try:
            return path, np.asarray(read.result())
        except _READ_ERRORS as error:
            raise _damaged(self._directory, error) from error


def _open_stores(directory: Path) -> dict[str, Any]:
    metadata = json.loads((directory / "_METADATA").read_text(encoding="utf-8"))
    names = [[str(part["key"]) for part in entry["key_metadata"]] for entry in metadata["tree_metadata"].values()]
    spec = {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "fill_missing_data_reads": False,  # a missing chunk would read as zeros
    }
    base = {"driver": "ocdbt", "base": directory.as_uri()}
    context = tensorstore.Context()
    opening = {
        ".".join(name): tensorstore.open(
            {**spec, "kvstore": {**base, "path": ".".join(name) + "/"}}, open=True, context=context
        )
        for name in names
    }
    return {path: store.result() for path, store in opening.items()}


def _damaged(directory: Path, error: Exception) -> ArtifactError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ArtifactError(
        f"{directory}: cannot be read as an Orbax checkpoint: {first}",
        hint="the files are missing, truncated or altered; run the stage that wrote them again",
    )
