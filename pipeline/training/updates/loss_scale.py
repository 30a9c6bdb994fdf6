"""The loss scale of float16.

Owns by how much a loss is multiplied before its gradient is taken, and how that changes. Knows nothing of the loop. The
one decision: whether gradients overflowed is read off the global gradient norm, which is made whole over all ranks
before anything is decided: an infinity or NaN of one rank is in it everywhere, so no second agreement is needed and no
rank can skip a step alone (pytorch issue 115710).

A scale is a power of two, so scaling and unscaling round nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_FIRST, _SMALLEST, _LARGEST = 2.0**16, 1.0, 2.0**24
_GROWS_AFTER_STEPS = 2000
"""Micikevicius et al., "Mixed Precision Training", 2018, and torch.amp.GradScaler: doubled after so many finite steps,
halved after one that is not."""


class LossScale:
    """Scale and the finite steps since it last changed; saved with a checkpoint."""

    def __init__(self) -> None:
        """Start at 2^16."""
        self.value = _FIRST
        self._finite_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide gradients by the scale, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        torch._foreach_mul_(shards, 1.0 / self.value)

    def adapt(self, *, is_finite: bool) -> bool:
        """Change the scale after a backward pass; True where the step is one to skip for it.

        A norm that is not finite at the smallest scale is no overflow: it is the model's or the data's, and not skipped
        here.
        """
        if is_finite:
            self._finite_steps += 1
            if self._finite_steps >= _GROWS_AFTER_STEPS:
                self.value, self._finite_steps = min(_LARGEST, self.value * 2), 0
            return False
        may_skip = self.value > _SMALLEST
        self.value, self._finite_steps = max(_SMALLEST, self.value / 2), 0
        return may_skip

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint; equal on all ranks."""
        return {"value": self.value, "finite_steps": self._finite_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.value, self._finite_steps = float(state_dict["value"]), int(state_dict["finite_steps"])
