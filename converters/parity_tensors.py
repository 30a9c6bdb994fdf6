"""The first level of parity: the leaves of the Flax model, mapped back, are the checkpoint's tensors bit for bit.

Owns that comparison. Knows nothing of frameworks and formats. The one decision: what differs is split into what a
declared cast rounded and what nothing explains, so an honest conversion to bfloat16 is not taken for damage.
"""

from pathlib import Path

import numpy as np

from converters.flax_source import FlaxSource
from converters.operations import DTYPES, Array
from converters.parity_report import TensorAgreement
from converters.readers import open_source


def compare_tensors(checkpoint: Path, *, model: Path) -> TensorAgreement:
    """Map the leaves of the Flax model back and compare each with the checkpoint's tensor, one at a time.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model or its conversion record is missing, unreadable or not of each other.
        ConversionError: the model's config is not of its family.
    """
    flax, source = FlaxSource(model), open_source(checkpoint)
    tensors = (*flax.manifest.sources, *flax.manifest.carried)
    inexact = {t.name for conversion in flax.manifest.tensors if not conversion.is_exact for t in conversion.sources}
    differing = [
        tensor.name
        for tensor in tensors
        if tensor.stored_name not in source.headers
        or not same_bits(
            flax.read(tensor.name).astype(DTYPES[tensor.dtype], copy=False), source.read(tensor.stored_name)
        )
    ]
    return TensorAgreement(
        num_tensors=len(tensors),
        num_identical=len(tensors) - len(differing),
        rounded=tuple(sorted(name for name in differing if name in inexact)),
        differing=tuple(sorted(name for name in differing if name not in inexact)),
    )


def same_bits(ours: Array, theirs: Array) -> bool:
    """True where both have one shape and the same bytes, a NaN's included."""
    return ours.shape == theirs.shape and np.array_equal(_bits(ours), _bits(theirs))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
