"""A checkpoint as training reads it: the model's own names, float32, one tensor at a time.

Owns that view of any checkpoint, and the files that go with it. Knows nothing of sharding. The one decision: whoever
launches training hands `open_weights` to it as a value, because training lies below this package and may not import it.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters.location import locate
from converters.operations import DTYPES, FLOAT_DTYPES, Array, Shape
from converters.readers import open_source
from converters.source import CheckpointSource
from converters.wrappers import canonical_names

_OF_THE_STORED = ("dtype", "torch_dtype", "quantization_config", "_name_or_path")
_SKETCHED_TENSORS = 16
"""Norms, in every family: a few kilobytes, which any training of all parameters changes."""
_MAX_SKETCHED_ELEMENTS = 2**26
"""Of one tensor of each kind, which adapters change where they are merged: 256 MiB at a time."""
_NUMBER = re.compile(r"\d+")


class NamedWeights:
    """An open checkpoint; holds headers, no weights."""

    def __init__(self, source: CheckpointSource, *, origin: str) -> None:
        self.origin = origin
        self._source = source
        self._stored = canonical_names(source.headers)
        self.shapes: Mapping[str, Shape] = MappingProxyType(
            {name: source.headers[stored].shape for name, stored in self._stored.items()}
        )

    def read(self, name: str) -> Array:
        """One tensor, floats in float32.

        Raises:
            CheckpointError: a file is missing, truncated or altered; names it.
        """
        array = self._source.read(self._stored[name])
        is_float = str(array.dtype) in (*FLOAT_DTYPES, "float64")
        return np.asarray(array, dtype=np.float32 if is_float else None, order="C")

    def dtype_of(self, name: str) -> str:
        """That of what `read` gives: `float32`, but for counters, masks and the like, which are as stored."""
        stored = self._source.headers[self._stored[name]].dtype
        return stored if stored in DTYPES and stored not in (*FLOAT_DTYPES, "float64") else "float32"

    def config(self) -> dict[str, Any]:
        """The transformers config of the model, without what says how its tensors are stored.

        Raises:
            ArtifactError: there is none, or it is malformed.
            CheckpointError: the format describes the model in a way that no config expresses.
        """
        return {name: value for name, value in self._source.config().items() if name not in _OF_THE_STORED}

    def sketch(self) -> str:
        """What tells these weights from others at little cost.

        All names and shapes, the bytes of the smallest tensors, and those of one tensor of each kind: the last of those
        whose names differ in numbers alone. A tensor of more than 2**26 elements is told by its shape.

        Raises:
            CheckpointError: a file is damaged.
        """
        hasher = hashlib.sha256(json.dumps(sorted(self.shapes.items())).encode())
        smallest = sorted(self.shapes, key=lambda name: (math.prod(self.shapes[name]), name))
        readable = [name for name in sorted(self.shapes) if math.prod(self.shapes[name]) <= _MAX_SKETCHED_ELEMENTS]
        of_kinds = {_NUMBER.sub("N", name): name for name in readable}
        for name in dict.fromkeys((*smallest[:_SKETCHED_TENSORS], *of_kinds.values())):
            hasher.update(self.read(name).tobytes())
        return f"sketch:{hasher.hexdigest()}"

    def companions(self) -> dict[str, bytes]:
        """Tokenizer and the like by file name.

        Raises:
            CheckpointError: one exists and cannot be read.
        """
        return self._source.companions()


def open_weights(place: str) -> NamedWeights:
    """Open the checkpoint at a path or fsspec URL; reads headers only.

    Raises:
        CheckpointError: there is none, it is damaged, or it cannot be fetched.
        ConversionError: two stored names are one tensor without their wrappers.
        ParameterError: the URL cannot be opened, or holds no file.
    """
    path: Path = locate(place)
    return NamedWeights(open_source(path), origin=place)
