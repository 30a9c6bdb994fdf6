"""One optimizer of several algorithms, whose state may lie on the host between steps.

Owns which algorithm updates which group, and when state is on the device. Knows nothing of rates or patterns. The one
decision: it holds groups and state itself and lends them to torch's own optimizers for the length of a step, so a
checkpoint sees one optimizer, and an algorithm is never written here.

State on the host: parameters and gradients stay on the device; the state of `_CHUNK_ELEMENTS` elements at a time is
brought there, used, and taken back (ZeRO-Offload, Ren et al., 2021, moves the update to the host instead), so a
step needs 8 bytes an element of one chunk, not of all. A parameter's update needs no other: the result is the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pipeline.training.updates.muon import WholeMatrixMuon

_CHUNK_ELEMENTS = 64 * 2**20
"""Elements of this rank's shards; with AdamW's two moments, 512 MiB of state on the device at a time."""


class MixedOptimizer(torch.optim.Optimizer):
    """AdamW and Muon as one; a group's `algorithm` says which."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], *, adamw: Mapping[str, Any], state_on_host: bool) -> None:
        """Take groups with `params`, `algorithm`, `weight_decay` and `learning_rate_ratio`.

        Args:
            groups: each parameter once.
            adamw: `lr`, `betas` and `fused`; Muon takes the `lr` alone.
            state_on_host: keep state in host memory between steps.
        """
        makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "adamw": lambda own: torch.optim.AdamW(own, **adamw),
            "muon": lambda own: WholeMatrixMuon(own, lr=adamw["lr"]),
        }
        self._members: dict[str, torch.optim.Optimizer] = {}
        for name, make in makers.items():
            own = [dict(group) for group in groups if group["algorithm"] == name]
            if own:
                self._members[name] = make(own)
        self._state_on_host = state_on_host
        # The members have completed their groups with their own defaults.
        super().__init__([group for member in self._members.values() for group in member.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "the loop computes gradients before it steps"
        for name, member in self._members.items():
            member.state = self.state
            groups = [group for group in self.param_groups if group["algorithm"] == name]
            if not self._state_on_host:
                member.param_groups = groups
                member.step()
                continue
            for group in groups:
                for chunk in _chunks(group["params"]):
                    member.param_groups = [group | {"params": chunk}]
                    self._move(chunk, to_host=False)
                    member.step()
                    self._move(chunk, to_host=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and state of a `state_dict` of the same groups.

        Torch brings all state to the parameters' device, which may have no room for it: state that is kept on the host
        stays there.
        """
        if not self._state_on_host:
            super().load_state_dict(state_dict)
            return
        super().load_state_dict({**state_dict, "state": {}})
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][key])
        self._move(own, to_host=True)

    def _move(self, parameters: Sequence[torch.Tensor], *, to_host: bool) -> None:
        for parameter in parameters:
            state = self.state.get(parameter, {})
            device = torch.device("cpu") if to_host else _local(parameter).device
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = _moved(value, device)


def _chunks(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of parameters of at most `_CHUNK_ELEMENTS` elements here, but at least one parameter."""
    chunk: list[torch.Tensor] = []
    elements = 0
    for parameter in parameters:
        own = _local(parameter).numel()
        if chunk and elements + own > _CHUNK_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append(parameter)
        elements += own
    if chunk:
        yield chunk


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values in the memory of `device`, as a DTensor where they were one."""
    if not isinstance(value, DTensor):
        return value.to(device)
    return DTensor.from_local(
        value.to_local().to(device),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
