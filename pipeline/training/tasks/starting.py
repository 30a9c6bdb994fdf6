"""A model at the start of training: drawn from the seed, or stored weights, with adapters or without.

Owns which of these a job asks for and in what order they are done around sharding. Knows nothing of files. The one
decision: stored weights are checked on the whole model before it is cut, and read after, so no rank holds them all.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline.errors import ParameterError
from pipeline.training.config import Lora, TrainConfig
from pipeline.training.start.weights import PlainTensor, StartingWeights, check_weights, fill, give_memory
from pipeline.training.tasks.empty_model import build_empty
from pipeline.training.tasks.model import model_config
from pipeline.training.tasks.task import Task

_ADAPTERS = "pipeline.training.start.adapters"
"""By name, for peft takes 2.7 s to import, and most trainings have no adapters."""


def start_model(task: Task, config: TrainConfig, *, weights: StartingWeights | None) -> nn.Module:
    """The whole model, before it is cut; without values where `weights` has them.

    Raises:
        CheckpointError: the weights are not those of the model.
        ParameterError: adapters are asked for without weights, or where they cannot be.
    """
    check_lora(config, has_weights=weights is not None)
    if weights is None:
        return task.build(seed=config.seed)
    model = task.build_empty(seed=config.seed)
    check_weights(model, weights)
    if config.lora is not None:
        adapt(model, config.lora)
    return model


def adapt(model: nn.Module, lora: Lora) -> None:
    """Put adapters beside the targets, in place, and freeze everything else.

    Raises:
        ParameterError: a target is the end of no linear layer's name.
    """
    _adapters().add_adapters(model, lora)


def fill_model(
    model: nn.Module, config: TrainConfig, *, weights: StartingWeights | None, device: torch.device, resumes: bool
) -> None:
    """Give the cut model of `start_model` its values; called by all ranks.

    Where training `resumes`, a checkpoint has them all, but for those that adapters leave as they were.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    if weights is None:
        return
    if resumes and config.lora is None:
        give_memory(model, device=device)
        return
    draw = None if config.lora is None else functools.partial(_adapters().draw_adapter, seed=config.seed)
    fill(model, weights, device=device, draw=draw)


def check_start(config: TrainConfig, weights: StartingWeights | None) -> Mapping[str, PlainTensor]:
    """Refuse what `start_model` would refuse, without ranks; the plain model's tensors.

    Nothing is known of a module of the user's own before it is built.

    Raises:
        CheckpointError: the weights are not those of the model.
        ParameterError: adapters are asked for where they cannot be.
    """
    check_lora(config, has_weights=weights is not None)
    if weights is None or isinstance(config.model, str):
        return {}
    model = build_empty(model_config(config.model))
    tensors = check_weights(model, weights)
    if config.lora is not None:
        _adapters().target_layers(model, config.lora)
    return tensors


def check_lora(config: TrainConfig, *, has_weights: bool) -> None:
    """Refuse adapters where they have no meaning.

    Raises:
        ParameterError: nothing is there to adapt, or another parameter says what is trained or handed on.
    """
    if config.lora is None:
        return
    if isinstance(config.model, str):
        raise ParameterError(
            f"lora: adapters are for language models, and {config.model!r} is a module of your own",
            hint="leave `lora` out; the module may hold adapters itself",
        )
    if not has_weights:
        raise ParameterError(
            "lora: adapters are trained on weights that exist, and `initial` names none",
            hint="name a checkpoint with `initial`, or leave `lora` out",
        )
    excluded = {
        "ema": config.ema is not None,
        "freeze": bool(config.freeze),
        "mesh.tensor": config.mesh.tensor > 1,
        "mesh.pipeline": config.mesh.pipeline > 1,
    }
    given = [name for name, is_given in excluded.items() if is_given]
    if given:
        raise ParameterError(
            f"lora trains its adapters alone, on whole layers; it excludes {', '.join(given)}",
            hint=f"leave out {' and '.join(given)}, or `lora`",
        )


def _adapters() -> Any:
    return importlib.import_module(_ADAPTERS)
