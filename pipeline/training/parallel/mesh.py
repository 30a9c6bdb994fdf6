"""How ranks share parameters, gradients and optimizer state.

Owns the presets, the axes of the device mesh, and what is reduced when. The one decision: every preset is FSDP2 on one
mesh with named axes; what tells them apart is the shape of the mesh and when parameters and gradients are whole.

With P parameters of 4 bytes, AdamW, N ranks, S ranks in a shard group, and `accumulation` passes in a step, a rank
holds (ZeRO, Rajbhandari et al., 2020, table 1, in float32):

| preset | mesh (replicate, shard) | parameters | gradients | optimizer | sent in a step, in units of P |
| --- | --- | --- | --- | --- | --- |
| ddp | (N, 1) | 4 P | 4 P | 8 P | 2 |
| zero1 | (1, N) | 4 P while stepping, 4 P / N between | 4 P while accumulating | 8 P / N | 2 |
| zero2 | (1, N) | 4 P from forward to backward | 4 P / N | 8 P / N | 2 x accumulation |
| zero3 | (1, N) | 4 P / N and a block | 4 P / N | 8 P / N | 3 x accumulation |
| hsdp | (N / S, S) | 4 P / S and a block | 4 P / S | 8 P / S | 3 x accumulation inside a group, 2 / S across |
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from pipeline.errors import ParameterError
from pipeline.training.config import Parallel
from pipeline.training.worker import WorkerContext

REPLICATE_AXIS, SHARD_AXIS = "replicate", "shard"
SHARDS_GRADIENTS = ("zero2", "zero3", "hsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Sizes of the mesh's axes."""

    parallel: Parallel
    replicate: int
    shard: int

    @property
    def reshards_after_forward(self) -> bool:
        """True where a block's parameters are freed between its forward and its backward pass."""
        return self.parallel in ("zero3", "hsdp")


def plan_mesh(parallel: Parallel, *, world_size: int, shard_group: int | None) -> MeshPlan:
    """The mesh of a preset.

    Args:
        parallel: the preset.
        world_size: ranks.
        shard_group: ranks that hold one copy of the model together, of `hsdp` alone.

    Raises:
        ParameterError: `shard_group` is missing, of no use, or does not divide the ranks.
    """
    if parallel != "hsdp":
        if shard_group is not None:
            raise ParameterError(
                f"shard_group: {shard_group} is for parallel: hsdp, found parallel: {parallel}",
                hint="leave `shard_group` out, or set `parallel: hsdp`",
            )
        is_ddp = parallel == "ddp"
        return MeshPlan(parallel=parallel, replicate=world_size if is_ddp else 1, shard=1 if is_ddp else world_size)
    if shard_group is None or world_size % shard_group:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        found = "it is missing" if shard_group is None else f"{shard_group} does not divide {world_size} workers"
        raise ParameterError(
            f"parallel: hsdp needs `shard_group`, the ranks that hold one copy of the model: {found}",
            hint=f"with {world_size} workers it may be {divisors}; ranks of one node are the fastest group",
        )
    return MeshPlan(parallel=parallel, replicate=world_size // shard_group, shard=shard_group)


def make_mesh(worker: WorkerContext, plan: MeshPlan) -> DeviceMesh:
    """The mesh over all ranks; its device type is explicit. One axis where nothing is replicated."""
    if plan.replicate == 1:
        return init_device_mesh(worker.device, (plan.shard,), mesh_dim_names=(SHARD_AXIS,))
    # Neighbouring ranks, which are on one node, share a copy: that is the axis with the most traffic.
    return init_device_mesh(worker.device, (plan.replicate, plan.shard), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))


def set_pass(model: FSDPModule, plan: MeshPlan, *, is_last: bool) -> None:
    """Say before a backward pass what it has to reduce and free; `is_last` is the last pass of the step."""
    if plan.parallel in SHARDS_GRADIENTS:
        model.set_requires_all_reduce(is_last)
    else:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
