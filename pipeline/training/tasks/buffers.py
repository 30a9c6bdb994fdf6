"""What a module keeps beside parameters, made equal on all ranks.

Owns the rule for buffers under data parallelism. Knows nothing of steps. The one decision: after every optimizer step
the running statistics of batch normalization are the mean over ranks, and every other buffer is that of rank 0. Each
rank normalizes by the rows of its own forward pass, as data parallel training without synchronised normalization does;
running statistics are an average over forward passes, and the mean over ranks is that same average over the passes of
all ranks. It is one reduction in a fixed order, so a resumed run sees the same bits, and what is saved is what every
rank has.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.training.worker import WorkerContext

_STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def agree_on_buffers(model: nn.Module, worker: WorkerContext) -> None:
    """Make every buffer of `model` equal on all ranks, in place; called by all of them."""
    if worker.world_size == 1:
        return
    averaged: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []
    for name, buffer, owner in _buffers(model):
        is_statistic = isinstance(owner, _NormBase) and name in _STATISTICS
        (averaged if is_statistic else copied).append(buffer)
    if averaged:
        flat = torch.cat([buffer.double().flatten() for buffer in averaged])
        dist.all_reduce(flat)
        _scatter(flat / worker.world_size, averaged)
    for dtype in sorted({buffer.dtype for buffer in copied}, key=str):
        same = [buffer for buffer in copied if buffer.dtype == dtype]
        # Booleans are not sent by every backend.
        flat = torch.cat([(buffer.byte() if dtype == torch.bool else buffer).flatten() for buffer in same])
        dist.broadcast(flat, src=0)
        _scatter(flat, same)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """(own name, buffer, owner) of every buffer, each once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer, module


def _scatter(flat: torch.Tensor, into: list[torch.Tensor]) -> None:
    sizes = [buffer.numel() for buffer in into]
    for buffer, values in zip(into, flat.split(sizes), strict=True):
        buffer.copy_(values.view(buffer.shape))
