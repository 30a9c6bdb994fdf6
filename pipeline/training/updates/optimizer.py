"""AdamW, Muon and gradient clipping over sharded parameters.

Owns the optimizer of a run, the learning rate in it, and the global gradient norm. Knows nothing of the loop. The one
decision: the norm is made whole on every rank before anything is decided on it, so all ranks decide the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.training.config import TrainConfig
from pipeline.training.updates.groups import rules_of
from pipeline.training.updates.mixed_optimizer import MixedOptimizer


def build_optimizer(model: nn.Module, config: TrainConfig, *, matrices: frozenset[str]) -> torch.optim.Optimizer:
    """The optimizer over what is trained; weight decay on matrices only, where no group says otherwise.

    Args:
        model: sharded; what is frozen has no gradient.
        config: the run.
        matrices: `hidden_matrices` of the model, by name.
    """
    groups = [
        {
            "params": parameters,
            "algorithm": rule.optimizer,
            "learning_rate_ratio": rule.learning_rate_ratio,
            "weight_decay": rule.weight_decay,
        }
        for rule, parameters in rules_of(model, config, matrices=matrices).items()
    ]
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    if config.offload != "optimizer" and all(group["algorithm"] == "adamw" for group in groups):
        return torch.optim.AdamW(groups, **options)
    return MixedOptimizer(groups, adamw=options, state_on_host=config.offload == "optimizer")


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate`, times the ratio of each group, in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The other stages of a pipeline, which hold other parameters of one model."""

    group: dist.ProcessGroup
    """One rank a stage."""
    counted_elsewhere: nn.Parameter | None
    """This rank's copy of a parameter that another stage has too."""


def clip_gradients(parameters: Sequence[nn.Parameter], *, max_norm: float, stages: Stages | None = None) -> float:
    """Scale gradients so that their global norm is at most `max_norm`; the norm before, equal on every rank.

    Gradients are untouched when the norm is not finite.
    """
    skipped = None if stages is None else stages.counted_elsewhere
    gradients = [item.grad for item in parameters if item.grad is not None and item is not skipped]
    norm = torch.nn.utils.get_total_norm(gradients)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if stages is not None:
        squares = whole.double().square()
        dist.all_reduce(squares, group=stages.group)
        whole = squares.sqrt().to(whole.dtype)
    value = float(whole.item())
    if value > max_norm and value != float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return value
