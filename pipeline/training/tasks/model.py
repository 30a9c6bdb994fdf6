"""The torch model of a training run.

Owns reading a transformers config and building the model from it. Knows nothing of sharding or data. The one decision:
every rank draws the full initial weights from the same seed, so the start does not depend on the number of ranks and
no broadcast is needed; memory for one full float32 copy a rank is the price.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from pipeline.errors import ParameterError, nearest_name
from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.parallel.axes import ModelShape, plan_axes
from pipeline.training.parallel.mesh import MeshPlan


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a transformers config file.

    Raises:
        ParameterError: it is missing, not JSON, or names no known model type.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ParameterError(
            f"model config {path}: cannot be read ({error.strerror})",
            hint="`model` is a transformers config.json relative to the project, such as configs/models/llama-8m.json",
        ) from error
    except json.JSONDecodeError as error:
        raise ParameterError(f"model config {path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from error
    if not isinstance(raw, dict):
        raise ParameterError(f"model config {path}: a JSON object is wanted, found {type(raw).__name__}")
    model_config(raw, where=str(path))
    return raw


def model_config(raw: Mapping[str, Any], *, where: str = "model config") -> PretrainedConfig:
    """The typed config behind the JSON.

    Raises:
        ParameterError: the model type is missing or unknown, or transformers refuses a value.
    """
    model_type = raw.get("model_type")
    known = list(CONFIG_MAPPING.keys())
    if model_type not in known:
        near = nearest_name(str(model_type), known)
        raise ParameterError(
            f"{where}: model_type {model_type!r} is not known to transformers"
            + (f"; did you mean {near!r}?" if near else ""),
            hint='the tested family is "llama"',
        )
    values = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ParameterError(f"{where}: transformers refuses it: {error}") from error


def check_fits(config: PretrainedConfig, *, vocabulary_size: int, sequence_length: int) -> None:
    """Hold the model against the dataset.

    Raises:
        ParameterError: the dataset has more tokens than the model, or longer rows than it has positions.
    """
    problems = []
    if vocabulary_size > config.vocab_size:
        problems.append(
            f"the dataset's vocabulary has {vocabulary_size} tokens, the model's vocab_size is {config.vocab_size}"
        )
    if sequence_length > config.max_position_embeddings:
        problems.append(
            f"rows of the dataset have sequence_length {sequence_length}, the model's max_position_embeddings is "
            f"{config.max_position_embeddings}"
        )
    if problems:
        raise ParameterError(
            "model and dataset do not fit: " + "; ".join(problems),
            hint="change `vocabulary_size` or `sequence_length` of the data stage, or the model's config file",
        )


def plan_run(config: TrainConfig, *, sequence_length: int | None, world_size: int) -> tuple[MeshPlan, BatchPlan]:
    """The mesh of a run and how its steps are cut; see `plan_axes`.

    Raises:
        ParameterError: what does not divide or go together, all of it.
    """
    shape = None if isinstance(config.model, str) else shape_of(model_config(config.model))
    return plan_axes(config, world_size=world_size, sequence_length=sequence_length, shape=shape)


def shape_of(config: PretrainedConfig) -> ModelShape:
    """What the rules of meshes ask of a model; sizes that a config lacks are 1."""
    heads = getattr(config, "num_attention_heads", 1)
    is_windowed = getattr(config, "use_sliding_window", True)
    return ModelShape(
        model_type=config.model_type,
        num_layers=getattr(config, "num_hidden_layers", 1),
        num_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        intermediate_size=getattr(config, "intermediate_size", 1),
        vocab_size=config.vocab_size,
        sliding_window=getattr(config, "sliding_window", None) if is_windowed else None,
    )


def build_model(config: PretrainedConfig, *, seed: int) -> nn.Module:
    """A float32 model with initial weights that depend on `seed` and the config alone; leaves torch's RNG as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks, in order."""
    decoder: Any = model.get_decoder()
    return list(decoder.layers)


def flops_per_token(config: PretrainedConfig, *, num_parameters: int, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 N + 12 L H Q T (Chowdhery et al., "PaLM", 2022, appendix B).

    N leaves out an input embedding that is only looked up, not multiplied.
    """
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * sequence_length
    return 6.0 * (num_parameters - looked_up) + attention
