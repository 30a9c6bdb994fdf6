"""A checkpoint's torch model and the Flax model made from it, in one process.

Owns the loading of both and the check that they are of one description. The one decision: the torch side is loaded
without the conversion rules, so that what is compared is two independent readings of the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flax import nnx

from converters.manifest import ConversionManifest
from converters.readers import open_source
from converters.torch_model import load_torch_model
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import load_model
from pipeline.models.config_file import read_config
from pipeline.models.description import ModelDescription
from pipeline.models.module_file import MODULE_FILE, ModuleFile
from pipeline.models.registry import describe


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Both models in float32, and what they are."""

    checkpoint: Path
    model: Path
    reference: torch.nn.Module
    candidate: nnx.Module
    description: ModelDescription
    manifest: ConversionManifest
    config: Mapping[str, Any]
    """The transformers config; empty for a module of the user's own."""


def load_pair(checkpoint: Path, *, model: Path) -> ModelPair:
    """Load the torch model of `checkpoint` and the Flax model in the directory `model`.

    Weights that the conversion rounded by a declared cast are rounded the same way on the torch side: what is compared
    is the computation, and `compare_tensors` says what was rounded.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model is missing or does not fit its config.
        ConversionError: the two directories describe different models; lists every key that differs.
    """
    ours, theirs = _own_description(model) or dict(read_config(model)), _checkpoint_description(checkpoint)
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differing:
        shown = "\n".join(
            f"  {key}: {json.dumps(theirs.get(key))} and {json.dumps(ours.get(key))}" for key in differing
        )
        raise ConversionError(f"{checkpoint} and {model} have different configs:\n{shown}")
    manifest = ConversionManifest.read(model)
    reference = load_torch_model(checkpoint)
    _round(reference, manifest=manifest)
    return ModelPair(
        checkpoint=checkpoint,
        model=model,
        reference=reference,
        candidate=load_model(model, dtype="float32"),
        description=describe(model),
        manifest=manifest,
        config={} if _own_description(model) else ours,
    )


def _checkpoint_description(checkpoint: Path) -> dict[str, Any]:
    source = open_source(checkpoint)
    return _own_description(source.directory) or source.config()


def _own_description(directory: Path) -> dict[str, Any]:
    """Of a module of the user's own; empty for a transformers model."""
    if not (directory / MODULE_FILE).is_file():
        return {}
    file = ModuleFile.read(directory)
    return {"factory": file.factory, "arguments": dict(file.arguments)}


@torch.no_grad()
def _round(reference: torch.nn.Module, *, manifest: ConversionManifest) -> None:
    wanted = {
        tensor.name: getattr(torch, conversion.targets[0].dtype)
        for conversion in manifest.tensors
        if not conversion.is_exact
        for tensor in conversion.sources
    }
    for name, value in reference.state_dict().items():
        if name in wanted:
            value.copy_(value.to(wanted[name]).to(value.dtype))
