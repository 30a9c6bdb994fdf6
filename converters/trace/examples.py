"""Example inputs for tracing.

Owns the derivation of inputs from a module file or from a transformers config and signature. Knows nothing of export.
The one decision: sizes that may vary get distinct example sizes of two or more, because export takes equal sizes, ones
and zeros for facts about the model.

Shapes: B batch, T tokens, S decoder tokens, C channels, H height, W width, F frames.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.errors import ConversionError
from pipeline.models.module_file import BATCH, ModuleFile

SEQUENCE = "sequence"
_BATCH_SIZE = 2
_OPEN_SIZES = (9, 5, 7, 11, 13, 6, 10, 14)
_FALLBACK_IMAGE_SIZE = 64
_NUM_FRAMES = 64
_NUM_SAMPLES = 4000
"""Of sound, where a model takes the raw wave: long enough for the usual stack of strided convolutions."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a module is traced with."""

    inputs: Mapping[str, Any]
    """By keyword of `forward`."""
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Names of the sizes that may vary, by input and axis."""


def module_examples(described: ModuleFile, *, dtype: torch.dtype) -> Examples:
    """Inputs as `module.json` declares them; floats in `dtype`."""
    sizes = {BATCH: _BATCH_SIZE}
    inputs: dict[str, torch.Tensor] = {}
    dynamic: dict[str, dict[int, str]] = {}
    for name, spec in described.inputs.items():
        for size in spec.shape:
            if isinstance(size, str) and size not in sizes:
                sizes[size] = _OPEN_SIZES[(len(sizes) - 1) % len(_OPEN_SIZES)]
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
        kind = getattr(torch, spec.dtype)
        inputs[name] = torch.zeros(shape, dtype=dtype if kind.is_floating_point else kind)
        dynamic[name] = {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
    return Examples(inputs=inputs, dynamic=dynamic)


def transformers_examples(module: torch.nn.Module, *, dtype: torch.dtype) -> Examples:
    """Inputs for a transformers model, from its main input and the signature of its `forward`.

    Raises:
        ConversionError: its main input is of no kind that is known here.
    """
    config = module.config
    accepted = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    inputs: dict[str, torch.Tensor] = {}
    dynamic: dict[str, dict[int, str]] = {}
    names = [main, *(name for name in ("input_ids", "pixel_values") if name in accepted and name != main)]
    if not _is_joint(config):
        names = names[:1]
    for name in names:
        inputs[name], dynamic[name] = _main_input(name, config, dtype=dtype)
    if "input_ids" in inputs and "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        dynamic["attention_mask"] = dict(dynamic["input_ids"])
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = torch.ones(_BATCH_SIZE, _OPEN_SIZES[1], dtype=torch.int64)
        dynamic["decoder_input_ids"] = {0: BATCH, 1: f"decoder_{SEQUENCE}"}
    ordered = [name for name in accepted if name in inputs]
    return Examples(inputs={name: inputs[name] for name in ordered}, dynamic=dynamic)


def _is_joint(config: Any) -> bool:
    """Whether a model has a tower of text and one of pixels, and needs both inputs."""
    return getattr(config, "text_config", None) is not None and getattr(config, "vision_config", None) is not None


def _main_input(name: str, config: Any, *, dtype: torch.dtype) -> tuple[torch.Tensor, dict[int, str]]:
    if name in ("input_ids", "decoder_input_ids"):
        return torch.ones(_BATCH_SIZE, _OPEN_SIZES[0], dtype=torch.int64), {0: BATCH, 1: SEQUENCE}
    if name == "pixel_values":
        return _pixels(getattr(config, "vision_config", None) or config, dtype=dtype), {0: BATCH}
    if name == "input_features":
        config = getattr(config, "audio_config", None) or config
        if hasattr(config, "input_feat_per_channel"):  # Speech2Text: frames first
            return torch.zeros(_BATCH_SIZE, _NUM_FRAMES, config.input_feat_per_channel, dtype=dtype), {0: BATCH}
        num_mels = getattr(config, "num_mel_bins", None) or 80
        # Whisper halves the frames once before its learned positions, which must come out full.
        num_frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else _NUM_FRAMES
        return torch.zeros(_BATCH_SIZE, num_mels, num_frames, dtype=dtype), {0: BATCH}
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # spectrograms
        return torch.zeros(_BATCH_SIZE, config.max_length, config.num_mel_bins, dtype=dtype), {0: BATCH}
    if name == "input_values":
        return torch.zeros(_BATCH_SIZE, _NUM_SAMPLES, dtype=dtype), {0: BATCH}
    raise ConversionError(
        f"{type(config).__name__}: no example can be derived for its main input {name!r}",
        hint="describe the module and its inputs in module.json (`factory: module:function`)",
    )


def _pixels(config: Any, *, dtype: torch.dtype) -> torch.Tensor:
    size = getattr(config, "image_size", None) or _FALLBACK_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    channels = getattr(config, "num_channels", None) or 3
    return torch.zeros(_BATCH_SIZE, channels, height, width, dtype=dtype)
