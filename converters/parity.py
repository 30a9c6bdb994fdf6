"""A checkpoint and the Flax model made from it, side by side in one process.

Owns the loading of both and the comparison of their tensors. Knows nothing of datasets or metrics. The one decision:
the torch side is loaded without the conversion rules, so that what is compared is two independent readings of the same
bytes; the tensors are compared through the rules run backwards.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import nnx

from converters.conversion import to_torch
from converters.manifest import ConversionManifest
from converters.readers import open_source
from converters.torch_model import load_torch_model
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, load_model, read_parameters
from pipeline.models.config_file import read_config


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Both models in float32, with the config they share."""

    reference: torch.nn.Module
    candidate: nnx.Module
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAgreement:
    """The Flax leaves, mapped back, held against the checkpoint bit for bit."""

    num_tensors: int
    num_identical: int
    rounded: tuple[str, ...]
    """Tensors that a declared cast changed."""
    differing: tuple[str, ...]
    """Tensors that differ and should not."""


def load_pair(checkpoint: Path, *, model: Path) -> ModelPair:
    """Load the torch model of `checkpoint` and the Flax model in the directory `model`.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model is missing or does not fit its config.
        ConversionError: the two directories describe different models; lists every key that differs.
    """
    config = read_config(model)
    theirs = read_config(open_source(checkpoint).directory)
    differing = sorted(key for key in config.keys() | theirs.keys() if config.get(key) != theirs.get(key))
    if differing:
        shown = "\n".join(
            f"  {key}: {json.dumps(theirs.get(key))} and {json.dumps(config.get(key))}" for key in differing
        )
        raise ConversionError(f"{checkpoint} and {model} have different configs:\n{shown}")
    return ModelPair(
        reference=load_torch_model(checkpoint), candidate=load_model(model, dtype="float32"), config=config
    )


def compare_tensors(checkpoint: Path, *, model: Path) -> TensorAgreement:
    """Map the leaves of the Flax model back and compare each with the checkpoint's tensor.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model or its conversion record is missing or unreadable.
        ConversionError: the leaves do not fit the model's config.
    """
    manifest = ConversionManifest.read(model)
    source = open_source(checkpoint)
    stored = canonical_names(source.headers)
    inexact = {t.name for conversion in manifest.tensors if not conversion.is_exact for t in conversion.sources}
    tensors = to_torch(read_parameters(model / PARAMETERS_DIRECTORY), read_config(model), dtypes=manifest.source_dtypes)
    differing = [
        name
        for name, tensor in tensors.items()
        if name not in stored or not np.array_equal(_bits(tensor), _bits(source.read(stored[name])))
    ]
    return TensorAgreement(
        num_tensors=len(tensors),
        num_identical=len(tensors) - len(differing),
        rounded=tuple(sorted(name for name in differing if name in inexact)),
        differing=tuple(sorted(name for name in differing if name not in inexact)),
    )


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
