"""Muon over sharded matrices.

Owns gathering what Newton-Schulz needs whole. Knows nothing of groups or rates. The one decision: the momentum is kept
and advanced as shards, and only the update is made whole, once a matrix and step, in float32 before it is rounded.
torch's own step on DTensors communicates inside each of the five iterations, and where it adds partial products it does
so in bfloat16: on two ranks its update of a 32 x 48 matrix was off by 2.4 % of the largest element.

Every rank iterates on every matrix. That is (ranks - 1) times redundant, 5 x (4 m^2 n + 2 m^3) operations for a matrix
of m x n with m <= n, and saves a second exchange.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

_RATE = "match_rms_adamw"
"""Updates as large as AdamW's, so that both take one learning rate and one weight decay (Liu et al., "Muon is Scalable
for LLM Training", 2025)."""


class WholeMatrixMuon(torch.optim.Muon):
    """`torch.optim.Muon` whose update is computed on the whole matrix, sharded or not."""

    def __init__(self, groups: Any, *, lr: float) -> None:
        """Take groups of matrices; momentum 0.95 with Nesterov's form, as the authors use it."""
        super().__init__(groups, lr=lr, adjust_lr_fn=_RATE)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        direction = _orthogonal(update, group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-_adjust_lr(group["lr"], _RATE, parameter.shape))


def _orthogonal(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, about, in the dtype and placement of `update`."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    direction = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    direction = direction.to(update.dtype)
    if not isinstance(update, DTensor):
        return direction
    # Every rank has the whole; each keeps its own part of it.
    return distribute_tensor(direction, update.device_mesh, update.placements, src_data_rank=None)
