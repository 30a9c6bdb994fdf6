"""How ranks share parameters, gradients and optimizer state.

Owns the presets, the axes of the device mesh, and what is reduced when. The one decision: every preset is FSDP2 on one
mesh with named axes; what tells them apart is the shape of the mesh and when parameters and gradients are whole.

The axes, outermost first: `pipeline`, `replicate`, `shard`, `context`, `tensor`. Neighbouring ranks differ in the last
one, which has the most traffic. Ranks that differ in `replicate` or `shard` train on different rows (there are
replicate x shard data ranks); those that differ in `context` on other parts of the same rows, and so their gradients
are summed too; those that differ in `tensor` or `pipeline` on the same tokens.

With P parameters of 4 bytes, AdamW, N ranks, S ranks in a shard group, and `accumulation` passes in a step, a rank
holds (ZeRO, Rajbhandari et al., 2020, table 1, in float32):

| preset | mesh (replicate, shard) | parameters | gradients | optimizer | sent in a step, in units of P |
| --- | --- | --- | --- | --- | --- |
| ddp | (N, 1) | 4 P | 4 P | 8 P | 2 |
| zero1 | (1, N) | 4 P while stepping, 4 P / N between | 4 P while accumulating | 8 P / N | 2 |
| zero2 | (1, N) | 4 P from forward to backward | 4 P / N | 8 P / N | 2 x accumulation |
| zero3 | (1, N) | 4 P / N and a block | 4 P / N | 8 P / N | 3 x accumulation |
| hsdp | (N / S, S) | 4 P / S and a block | 4 P / S | 8 P / S | 3 x accumulation inside a group, 2 / S across |

N counts replicate x shard x context; tensor and pipeline divide P itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.fsdp import FSDPModule

from pipeline.errors import ParameterError
from pipeline.training.config import MeshSizes, Parallel
from pipeline.training.worker import DataShare, WorkerContext

PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, CONTEXT_AXIS, TENSOR_AXIS = AXES = (
    "pipeline",
    "replicate",
    "shard",
    "context",
    "tensor",
)
SHARDS_GRADIENTS = ("zero2", "zero3", "hsdp")
_COPIES, _SHARDS, _PIECES = "copies", "shards", "pieces"
"""Names of flattened axes: replicate with context, shard with context, and what holds the pieces of one parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Sizes of the mesh's axes."""

    parallel: Parallel
    replicate: int
    shard: int
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def reshards_after_forward(self) -> bool:
        """True where a block's parameters are freed between its forward and its backward pass."""
        return self.parallel in ("zero3", "hsdp")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return self.pipeline, self.replicate, self.shard, self.context, self.tensor

    @property
    def data_ranks(self) -> int:
        """Parts into which the rows of a step are dealt."""
        return self.replicate * self.shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which FSDP averages a gradient."""
        return self.data_ranks * self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The axes that this rank is on."""

    plan: MeshPlan
    root: DeviceMesh
    """All axes of more than one rank, and `shard`."""
    fsdp: DeviceMesh
    """(shards,), or (copies, shards): ranks that hold one parameter together, and copies of it."""

    def axis(self, name: str) -> DeviceMesh | None:
        """The 1-D mesh of an axis; None where it has one rank."""
        names = self.root.mesh_dim_names or ()
        return self.root[name] if name in names and self.root[name].size() > 1 else None

    def place(self, name: str) -> int:
        """This rank's coordinate on an axis."""
        axis = self.axis(name)
        return 0 if axis is None else axis.get_local_rank()

    @property
    def share(self) -> DataShare:
        """Which rows and which part of them this rank trains on."""
        return DataShare(
            rank=self.place(REPLICATE_AXIS) * self.plan.shard + self.place(SHARD_AXIS),
            num_ranks=self.plan.data_ranks,
            context_rank=self.place(CONTEXT_AXIS),
            num_context_ranks=self.plan.context,
        )


def plan_mesh(
    parallel: Parallel, *, world_size: int, shard_group: int | None, sizes: MeshSizes = MeshSizes()
) -> MeshPlan:
    """The mesh of a preset.

    Args:
        parallel: the preset.
        world_size: ranks.
        shard_group: ranks that hold one copy of the model together, of `hsdp` alone.
        sizes: of the axes that cut the model itself.

    Raises:
        ParameterError: the axes do not divide the ranks; `shard_group` is missing, of no use, or does not divide what
            they leave.
    """
    cut = {"pipeline": sizes.pipeline, "context": sizes.context, "tensor": sizes.tensor}
    data_ranks, rest = divmod(world_size, sizes.model_ranks)
    if rest or not data_ranks:
        raise ParameterError(
            f"mesh: {sizes.in_words} = {sizes.model_ranks} ranks do not divide {world_size} workers",
            hint=f"give the stage a multiple of {sizes.model_ranks} workers, or make an axis smaller",
        )
    if parallel != "hsdp":
        if shard_group is not None:
            raise ParameterError(
                f"shard_group: {shard_group} is for parallel: hsdp, found parallel: {parallel}",
                hint="leave `shard_group` out, or set `parallel: hsdp`",
            )
        is_ddp = parallel == "ddp"
        return MeshPlan(
            parallel=parallel, replicate=data_ranks if is_ddp else 1, shard=1 if is_ddp else data_ranks, **cut
        )
    if shard_group is None or data_ranks % shard_group:
        divisors = ", ".join(str(size) for size in range(1, data_ranks + 1) if data_ranks % size == 0)
        workers = f"{data_ranks} workers" if sizes.model_ranks == 1 else f"{data_ranks} data ranks"
        found = "it is missing" if shard_group is None else f"{shard_group} does not divide {workers}"
        raise ParameterError(
            f"parallel: hsdp needs `shard_group`, the ranks that hold one copy of the model: {found}",
            hint=f"with {workers} it may be {divisors}; ranks of one node are the fastest group",
        )
    return MeshPlan(parallel=parallel, replicate=data_ranks // shard_group, shard=shard_group, **cut)


def make_mesh(worker: WorkerContext, plan: MeshPlan, *, order: Sequence[int] | None = None) -> Mesh:
    """The mesh over all ranks; its device type is explicit.

    Args:
        worker: this rank.
        plan: sizes of the axes.
        order: ranks in the order of the mesh, from `place`; by number where it is None.
    """
    kept = [(name, size) for name, size in zip(AXES, plan.sizes, strict=True) if size > 1 or name == SHARD_AXIS]
    ranks = torch.tensor(order if order is not None else range(worker.world_size))
    before = set(_world.pg_map)
    root = DeviceMesh(
        worker.device,
        ranks.view([size for _, size in kept]),
        mesh_dim_names=tuple(name for name, _ in kept),
    )
    mesh = Mesh(plan=plan, root=root, fsdp=_fsdp_mesh(root, plan))
    # Groups of an axis get torch's own 30 minutes, whatever the whole gang was given.
    for group in set(_world.pg_map) - before:
        _set_pg_timeout(timedelta(seconds=worker.collective_timeout_seconds), group)
    return mesh


def _fsdp_mesh(root: DeviceMesh, plan: MeshPlan) -> DeviceMesh:
    """Ranks that differ in context hold other tokens, so they are copies or shards like those of other rows."""
    copies = root[REPLICATE_AXIS] if plan.replicate > 1 else None
    shards = root[SHARD_AXIS]
    if plan.context > 1 and plan.parallel == "ddp":
        copies = root[CONTEXT_AXIS] if copies is None else root[REPLICATE_AXIS, CONTEXT_AXIS]._flatten(_COPIES)
    elif plan.context > 1:
        shards = root[SHARD_AXIS, CONTEXT_AXIS]._flatten(_SHARDS)
    if plan.tensor > 1:
        # A norm over two axes is one reduction where they are known as one.
        outer = (CONTEXT_AXIS,) if plan.context > 1 and plan.parallel != "ddp" else ()
        root[SHARD_AXIS, *outer, TENSOR_AXIS]._flatten(_PIECES)
    if copies is None:
        return shards
    if plan.context == 1:
        return root[REPLICATE_AXIS, SHARD_AXIS]
    return DeviceMesh._concatenate([copies, shards])


def pipeline_line(mesh: Mesh, worker: WorkerContext) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """This rank's pipeline, and the pair of its first and last stage; None where there is one stage.

    All ranks call this together. The pair's group exists on the other stages too, which are no members of it.
    """
    axis = mesh.axis(PIPELINE_AXIS)
    if axis is None:
        return None
    if mesh.plan.pipeline == 2:
        return axis.get_group(), axis.get_group()
    names = mesh.root.mesh_dim_names or ()
    lines = mesh.root.mesh.movedim(names.index(PIPELINE_AXIS), -1).reshape(-1, mesh.plan.pipeline)
    mine: dist.ProcessGroup | None = None
    for line in lines.tolist():
        group = dist.new_group([line[0], line[-1]], timeout=timedelta(seconds=worker.collective_timeout_seconds))
        if worker.rank in line:
            mine = group
    assert mine is not None
    return axis.get_group(), mine


def set_pass(model: FSDPModule, plan: MeshPlan, *, is_last: bool) -> None:
    """Say before a backward pass what it has to reduce and free; `is_last` is the last pass of the step."""
    if plan.parallel in SHARDS_GRADIENTS:
        model.set_requires_all_reduce(is_last)
    else:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
