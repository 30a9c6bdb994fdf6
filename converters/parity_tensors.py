"""The first level of parity: the leaves of the Flax model, mapped back, are the checkpoint's tensors bit for bit.

Owns that comparison. Knows nothing of frameworks and formats. The one decision: what differs is split into what a
declared cast rounded and what nothing explains, so an honest conversion to bfloat16 is not taken for damage.
"""

from pathlib import Path

import numpy as np

from converters.conversion import to_torch
from converters.manifest import ConversionManifest
from converters.operations import Array
from converters.parity_report import TensorAgreement
from converters.readers import open_source
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, read_parameters
from pipeline.models.config_file import read_config


def compare_tensors(checkpoint: Path, *, model: Path) -> TensorAgreement:
    """Map the leaves of the Flax model back and compare each with the checkpoint's tensor.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model or its conversion record is missing or unreadable.
        ConversionError: the leaves do not fit the model's config.
    """
    manifest = ConversionManifest.read(model)
    source = open_source(checkpoint)
    stored = {t.name: t.stored_name for conversion in manifest.tensors for t in conversion.sources}
    inexact = {t.name for conversion in manifest.tensors if not conversion.is_exact for t in conversion.sources}
    tensors = to_torch(read_parameters(model / PARAMETERS_DIRECTORY), read_config(model), dtypes=manifest.source_dtypes)
    differing = [
        name
        for name, tensor in tensors.items()
        if stored.get(name) not in source.headers or not np.array_equal(_bits(tensor), _bits(source.read(stored[name])))
    ]
    return TensorAgreement(
        num_tensors=len(tensors),
        num_identical=len(tensors) - len(differing),
        rounded=tuple(sorted(name for name in differing if name in inexact)),
        differing=tuple(sorted(name for name in differing if name not in inexact)),
    )


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
