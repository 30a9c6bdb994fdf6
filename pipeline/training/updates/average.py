"""An exponential moving average of the parameters.

Owns the average, sharded as the parameters are, and lending it to the model. Knows nothing of losses or checkpoints.
The one decision: the decay is a function of the step alone, and the average is part of the checkpoint, so a resumed run
has the same bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

AVERAGE_EXTRA = "ema"
"""Under `extras` in a checkpoint; `converters.torch_dcp_reader` reads the model from there."""


class WeightAverage:
    """The average of what is trained, by parameter name; float32, in the memory where the parameters are."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        """Start from the parameters as they are."""
        self._model = model
        self._decay = decay
        self._parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self._average = {name: item.detach().clone() for name, item in self._parameters.items()}

    @torch.no_grad()
    def update(self, *, done: int) -> None:
        """Take the parameters after `done` steps in.

        The decay is at most (1 + done) / (10 + done), so that the first steps are not an average of initial weights
        (as TensorFlow's ExponentialMovingAverage has it with `num_updates`).
        """
        decay = min(self._decay, (1 + done) / (10 + done))
        torch._foreach_lerp_(
            [_shard(self._average[name]) for name in self._parameters],
            [_shard(item) for item in self._parameters.values()],
            1 - decay,
        )

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Exchange parameters and average while the context is open; one tensor is copied at a time."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """The average by name."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a saved average over."""
        for name, average in self._average.items():
            average.copy_(state_dict[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            ours, theirs = _shard(self._average[name]), _shard(parameter)
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)
        # A forward pass without a backward pass leaves some groups gathered; they must not outlive the exchange.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
