"""FSDP2 on a mesh.

Owns which modules become groups, where shards lie, and the proof at start that reductions on this backend add up. Knows
nothing of data or optimizers. The one decision: on gloo gradients are summed and divided explicitly (`ReduceOp.AVG` on
gloo has silently summed: pytorch issue 162338), and a canary must agree with a known mean before the first step.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from pipeline.errors import ClusterError
from pipeline.training.config import Precision
from pipeline.training.precision import mixed_precision
from pipeline.training.worker import WorkerContext

_CANARY_TOLERANCE = 1e-6
"""Means of small integers are exact in float32; AVG taken for SUM is off by the world size."""


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[nn.Module],
    precision: Precision,
    reshard_after_forward: bool,
    offloads: bool = False,
) -> None:
    """Apply FSDP2 in place: one group a block, and the root with the (tied) embedding, the head and the last norm.

    Args:
        model: on any device.
        mesh: of all ranks.
        blocks: submodules that become a group each.
        precision: dtype that parameters are gathered in.
        reshard_after_forward: free a block's parameters between its forward and its backward pass; the last one's, with
            which the backward pass begins, stay.
        offloads: keep shards of parameters and gradients in host memory, pinned where a GPU copies from it.
    """
    policy = mixed_precision(precision)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloads else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for block in blocks:
        shard(block, reshard_after_forward=reshard_after_forward and block is not blocks[-1])
    # The root keeps its parameters between forward and backward, which begins with the head: freeing them there only
    # costs a second all-gather (3 % of a step of the 8 M model over gloo).
    shard(model, reshard_after_forward=False)
    _divide_explicitly(model, mesh)
    if mesh.device_type == "cpu":
        _gather_ahead(model, blocks)


def _gather_ahead(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let the next block be gathered while one computes.

    Without streams FSDP2 waits for each gather where it is asked for, and with it for the slower rank.
    """
    for block, following in itertools.pairwise((model, *blocks)):
        block.set_modules_to_forward_prefetch([following])
    model._set_unshard_async_op(True)


def _divide_explicitly(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.device_type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def check_reductions(worker: WorkerContext, mesh: DeviceMesh) -> None:
    """Compare an all-reduce over all ranks and an FSDP gradient over `mesh` with values known in advance.

    Raises:
        ClusterError: they differ; training would be silently wrong.
    """
    total = torch.tensor([float(worker.rank + 1)], device=worker.torch_device)
    dist.all_reduce(total)
    expected_total = worker.world_size * (worker.world_size + 1) / 2

    layer = nn.Linear(worker.world_size, 1, bias=False, device=worker.torch_device)
    fully_shard(layer, mesh=mesh)
    _divide_explicitly(layer, mesh)
    inputs = torch.full((1, worker.world_size), float(worker.rank + 1), device=worker.torch_device)
    layer(inputs).sum().backward()
    gradient = layer.weight.grad.full_tensor()
    expected_mean = float((mesh.mesh + 1).double().mean())

    error = max(abs(total.item() - expected_total), (gradient - expected_mean).abs().max().item())
    if not error <= _CANARY_TOLERANCE:
        raise ClusterError(
            f"rank {worker.rank}: reductions over {worker.backend} are wrong before step 1: all-reduce gave "
            f"{total.item():g}, known sum {expected_total:g}; FSDP gradient {gradient.flatten().tolist()}, known mean "
            f"{expected_mean:g}",
            hint="this build of torch and this backend cannot train correctly together; try another torch version",
        )
