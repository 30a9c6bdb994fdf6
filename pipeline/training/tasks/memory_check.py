"""Whether a training fits into memory, before anything of it is built.

Owns the comparison of what ranks need with what they have, on all ranks at once, and what a user is told. Knows nothing
of how either is found out. The one decision: what is certain (parameters, gradients, optimizer, averages) is refused
where it does not fit; activations are an estimate, and where they are too much it is said and training is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from pipeline.errors import ClusterError, ParameterError, PipelineError
from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.memory_limits import MemoryLimit, Place, device_limits, host_limits
from pipeline.training.parallel.memory_estimate import LIBRARIES_BYTES, MemoryEstimate, ModelSize
from pipeline.training.parallel.mesh import MeshPlan, plan_mesh
from pipeline.training.tasks.memory_count import count_memory
from pipeline.training.tasks.memory_sizes import CertainMemory, certain_of, estimate_of
from pipeline.training.tasks.task import Task
from pipeline.training.worker import WorkerContext

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A limit, and the ranks that share it."""

    limit: MemoryLimit
    ranks: tuple[int, ...]

    @property
    def bytes_each(self) -> int:
        """What each of them may hold."""
        return self.limit.total_bytes // len(self.ranks)

    @property
    def in_words(self) -> str:
        """Such as `the memory of a: 24,105 MiB, shared by ranks 0, 1: 12,052 MiB each`."""
        text = f"{self.limit.name}: {_mib(self.limit.total_bytes)}"
        if self.limit.free_bytes is not None:
            text += f" ({_mib(self.limit.free_bytes)} free)"
        named = ", ".join(map(str, self.ranks))
        if len(self.ranks) == 1:
            return f"{text}, of rank {named}"
        return f"{text}, shared by ranks {named}: {_mib(self.bytes_each)} each"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What all ranks have, and what each holds of the state of training."""

    shares: tuple[Share, ...]
    num_parameters: int
    """Of the whole model, adapters included."""
    state_bytes: int
    """Parameters, gradients, optimizer and average of a rank, at least."""
    warning: str = ""
    """Of activations that may be too much."""

    def least(self, place: Place) -> Share | None:
        """The share with the least for each of its ranks."""
        return min((one for one in self.shares if one.limit.place == place), key=_bytes_each, default=None)


def check_memory(
    size: ModelSize, config: TrainConfig, *, mesh: MeshPlan, worker: WorkerContext, is_drawn: bool
) -> Room:
    """Hold what is certain against what there is; called by all ranks inside the process group.

    Args:
        size: of the whole model; activations do not count.
        config: the run.
        mesh: its ranks.
        worker: this rank.
        is_drawn: True where each rank is about to make the whole model from the seed.

    Raises:
        ParameterError: it does not fit, on every rank with the same arithmetic.
        ClusterError: it would fit if others did not hold memory of the device.
    """
    shares = shares_of(_gathered(worker))
    options: dict[str, Any] = {"on_gloo": worker.device == "cpu", "is_drawn": is_drawn}
    needs = certain_of(size, config, mesh=mesh, **options)
    error = shortage(needs, shares)
    if error is not None:
        ways = ways_out(size, config, mesh=mesh, shares=shares, **options)
        what = f"{size.parameters:,} parameters, {size.trained:,} of them trained, over {worker.world_size} ranks with "
        raise type(error)(f"{error.message}\n({what}parallel: {config.parallel})", hint=f"{error.hint}: {ways}")
    updates = [need for need in needs if need.moment == "in every update"]
    return Room(
        shares=tuple(shares),
        num_parameters=size.parameters,
        state_bytes=sum(need.estimate.peak_bytes for need in updates),
    )


def shares_of(limits: Sequence[Sequence[MemoryLimit]]) -> list[Share]:
    """Each limit once, with all ranks that found it.

    Args:
        limits: of each rank, by rank.
    """
    found: dict[tuple[str, str], tuple[MemoryLimit, list[int]]] = {}
    for rank, of_rank in enumerate(limits):
        for limit in of_rank:
            key = (limit.place, limit.key or f"rank {rank}, {limit.name}")
            found.setdefault(key, (limit, []))[1].append(rank)
    return [Share(limit=limit, ranks=tuple(ranks)) for limit, ranks in found.values()]


def shortage(needs: Sequence[CertainMemory], shares: Sequence[Share]) -> PipelineError | None:
    """What does not fit, with the arithmetic; None where all does.

    Args:
        needs: of every rank.
        shares: of all ranks.
    """
    lines, is_lasting = [], False
    for need in needs:
        needed = need.estimate.peak_bytes
        own = [share for share in shares if share.limit.place == need.place]
        lasting = [share for share in own if needed > share.bytes_each]
        passing = [share for share in own if share not in lasting and _is_taken(share, needed)]
        if not (lasting or passing):
            continue
        is_lasting = is_lasting or bool(lasting)
        lines.append(f"  {need.moment} a rank holds at least {_mib(needed)} of {need.place} memory:")
        parts = {str(kind): held for kind, held in need.estimate.by_kind.items() if held}
        lines += [f"    {kind} {_mib(held)}" for kind, held in parts.items()]
        lines += [f"    {share.in_words}" for share in (*lasting, *passing)]
    if not lines:
        return None
    text = "\n".join(["training does not fit into memory, whatever its activations take; nothing was built", *lines])
    if is_lasting:
        return ParameterError(text, hint="make what a rank holds smaller")
    return ClusterError(text, hint="look who else holds memory of the device; or make what a rank holds smaller")


def ways_out(
    size: ModelSize, config: TrainConfig, *, mesh: MeshPlan, shares: Sequence[Share], on_gloo: bool, is_drawn: bool
) -> str:
    """What would fit by the same arithmetic, and what helps besides; arguments as of `check_memory`."""
    ranks = mesh.data_ranks * config.mesh.model_ranks
    zero3 = replace(config, parallel="zero3", shard_group=None)
    over_all = plan_mesh("zero3", world_size=ranks, shard_group=None, sizes=config.mesh)
    tried: dict[str, tuple[TrainConfig, MeshPlan]] = {}
    if config.parallel in ("ddp", "hsdp"):
        tried["`parallel: zero3`"] = zero3, over_all
    if not on_gloo:
        tried["`offload: optimizer`"] = replace(config, offload="optimizer"), mesh
        tried["`offload: all`"] = replace(config, offload="all"), mesh
    ways = []
    for name, (changed, its_mesh) in tried.items():
        needs = certain_of(size, changed, mesh=its_mesh, on_gloo=on_gloo, is_drawn=is_drawn)
        if shortage(needs, shares) is None:
            ways.append(f"{name} fits ({_mib(max(need.estimate.peak_bytes for need in needs))} of a rank)")
    of_one = certain_of(size, zero3, mesh=replace(over_all, shard=1), on_gloo=on_gloo, is_drawn=False)
    there = {share.limit.place: share.bytes_each for share in sorted(shares, key=_bytes_each, reverse=True)}
    if all(there[need.place] for need in of_one):
        most = max(math.ceil(need.estimate.peak_bytes / there[need.place]) for need in of_one)
        ways.append(f"`parallel: zero3` needs {most * config.mesh.model_ranks} ranks with as much memory each")
    if is_drawn:
        ways.append("`initial` spares each rank the whole model, for stored weights are read shard by shard")
    return "; ".join([*ways, "a smaller model, `lora` or `freeze` need less; `pipeline estimate` tries them"])


def activation_warning(
    task: Task, config: TrainConfig, *, mesh: MeshPlan, batch: BatchPlan, room: Room, on_gloo: bool
) -> str:
    """What to say where a step's activations may be too much, of a language model; empty where they are not.

    No rows are read, and no parameter is allocated.

    Args:
        task: model and rows.
        config: the run.
        mesh: its ranks.
        batch: its steps.
        room: what ranks have.
        on_gloo: True for CPU ranks.
    """
    alone = WorkerContext(rank=0, world_size=1, local_rank=0, device="cpu", device_reason="nothing is computed")
    blank = np.zeros((batch.rows_per_micro_batch, batch.units_per_step // batch.rows_per_step + 1), np.int32)
    try:
        size = count_memory(task, config, batch, worker=alone, rows=blank)
    except RuntimeError as error:  # what depends on values cannot be run without them
        first_line = str(error).partition("\n")[0]
        return f"how much memory activations take is not known: the model does not run without values ({first_line})"
    estimate = estimate_of(
        size, config, mesh=mesh, batch=batch, on_gloo=on_gloo, keeps_snapshot=config.checkpoint_async
    )
    return warning_of(estimate, room.least("host" if on_gloo else "device"), on_gloo=on_gloo)


def warning_of(estimate: MemoryEstimate, share: Share | None, *, on_gloo: bool) -> str:
    """As `activation_warning`, of the estimate of a rank's peak and the least that a rank has."""
    by_kind = {str(kind): held for kind, held in estimate.by_kind.items() if held}
    if on_gloo:
        by_kind["libraries"] = LIBRARIES_BYTES
    peak = sum(by_kind.values())
    if share is None or (peak <= share.bytes_each and not _is_taken(share, peak)):
        return ""
    parts = ", ".join(f"{kind} {_mib(held)}" for kind, held in by_kind.items())
    return (
        f"memory may be too small: by estimate a rank holds {_mib(peak)} at its peak ({parts}); {share.in_words}; "
        "smaller `micro_batch_sequences` or `activation_checkpointing: full` need less"
    )


def _gathered(worker: WorkerContext) -> list[list[MemoryLimit]]:
    mine = host_limits() + ([] if worker.device == "cpu" else device_limits(worker.torch_device))
    limits: list[list[MemoryLimit]] = [[]] * worker.world_size
    dist.all_gather_object(limits, mine)
    return limits


def _is_taken(share: Share, needed: int) -> bool:
    """True where the device has the memory, and not free."""
    free = share.limit.free_bytes
    return free is not None and needed * len(share.ranks) > free


def _bytes_each(share: Share) -> int:
    return share.bytes_each


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
