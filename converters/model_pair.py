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
from converters.torch_own_module import load_own_module
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import load_model
from pipeline.models.config_file import read_config
from pipeline.models.description import ModelDescription
from pipeline.models.module_file import MODULE_FILE
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


def load_pair(checkpoint: Path, *, model: Path, project_root: Path | None = None) -> ModelPair:
    """Load the torch model of `checkpoint` and the Flax model in the directory `model`.

    Weights that the conversion rounded by a declared cast are rounded the same way on the torch side: what is compared
    is the computation, and `compare_tensors` says what was rounded.

    Args:
        checkpoint: of the torch model.
        model: the Flax model directory.
        project_root: where the factory of a module of the user's own is looked for; the working directory by default.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model is missing or does not fit its config.
        ParameterError: the factory of a module of the user's own cannot be imported.
        ConversionError: the two directories describe different models; lists every key that differs.
    """
    source = open_source(checkpoint)
    is_own = (source.directory / MODULE_FILE).is_file()
    manifest = ConversionManifest.read(model)
    config = {} if is_own else dict(read_config(model))
    if not is_own:
        _check_config(checkpoint, source.config(), model=model, ours=config)
    reference: torch.nn.Module
    if is_own:
        reference = load_own_module(checkpoint, project_root=project_root or Path.cwd())
        _round(reference, manifest=manifest)
    else:
        # By stored name: transformers gives its modules other names than it writes.
        reference = load_torch_model(checkpoint, rounding=_rounding(manifest))
    return ModelPair(
        checkpoint=checkpoint,
        model=model,
        reference=reference,
        candidate=load_model(model, dtype="float32"),
        description=describe(model),
        manifest=manifest,
        config=config,
    )


def _check_config(checkpoint: Path, theirs: Mapping[str, Any], *, model: Path, ours: Mapping[str, Any]) -> None:
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differing:
        shown = "\n".join(
            f"  {key}: {json.dumps(theirs.get(key))} and {json.dumps(ours.get(key))}" for key in differing
        )
        raise ConversionError(f"{checkpoint} and {model} have different configs:\n{shown}")


def _rounding(manifest: ConversionManifest) -> dict[str, str]:
    """The dtype that a declared cast rounded a tensor to, by its stored name and by its name in the module."""
    by_name = {
        tensor.name: (tensor.stored_name, conversion.targets[0].dtype)
        for conversion in manifest.tensors
        if not conversion.is_exact
        for tensor in conversion.sources
    }
    tied = {name: by_name[same_as][1] for name, same_as in manifest.tied.items() if same_as in by_name}
    return {**tied, **{name: dtype for name, (_, dtype) in by_name.items()}, **dict(by_name.values())}


@torch.no_grad()
def _round(reference: torch.nn.Module, *, manifest: ConversionManifest) -> None:
    wanted = _rounding(manifest)
    for name, value in reference.state_dict().items():
        if name in wanted:
            value.copy_(value.to(getattr(torch, wanted[name])).to(value.dtype))
