"""AdamW and gradient clipping over sharded parameters.

Owns parameter groups, the learning rate in them, and the global gradient norm. Knows nothing of the loop. The one
decision: the norm is made whole on every rank before anything is decided on it, so all ranks decide the same.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.training.config import TrainConfig


def build_adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (parameters of two or more dims)."""
    parameters = list(model.parameters())
    groups = [
        {"params": [item for item in parameters if item.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [item for item in parameters if item.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scale gradients so that their global norm is at most `max_norm`; the norm before, equal on every rank.

    Gradients are untouched when the norm is not finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    value = float(whole.item())
    if value > max_norm and value != float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return value
