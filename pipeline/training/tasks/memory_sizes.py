"""From what a run is to what the arithmetic of its memory asks.

Owns the translation of a config and a mesh. Knows nothing of how bytes are added up. The one decision: bytes of one
parameter come from the config's own words, so a new precision or optimizer has one place here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.training.config import BatchPlan, Offload, TrainConfig
from pipeline.training.memory_limits import Place
from pipeline.training.parallel.memory_estimate import (
    ADAMW_BYTES,
    FLOAT32_BYTES,
    MUON_BYTES,
    Kind,
    MemoryEstimate,
    ModelSize,
    RankPlan,
    estimate_memory,
    state_memory,
)
from pipeline.training.parallel.mesh import MeshPlan
from pipeline.training.precision import SUPPORT

_ON_HOST: Mapping[Offload, tuple[Kind, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("optimizer", "parameters", "gradients", "average"),
}
"""Of a rank with a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertainMemory:
    """Bytes that a rank holds at one moment in one memory, whatever a step computes."""

    place: Place
    moment: str
    """In words."""
    estimate: MemoryEstimate


def estimate_of(
    size: ModelSize, config: TrainConfig, *, mesh: MeshPlan, batch: BatchPlan, on_gloo: bool, keeps_snapshot: bool
) -> MemoryEstimate:
    """What a rank of this run holds at its peak; on a GPU without what is kept on the host.

    Args:
        size: of the whole model, for one micro-batch.
        config: the run.
        mesh: its ranks.
        batch: its steps.
        on_gloo: True for CPU ranks.
        keeps_snapshot: True where checkpoints are written in the background.
    """
    plan = replace(_rank_plan(config, mesh), accumulation=batch.accumulation, on_gloo=on_gloo)
    estimate = estimate_memory(size, replace(plan, keeps_snapshot=keeps_snapshot))
    return estimate if on_gloo else estimate.without("snapshot", *_ON_HOST[config.offload])


def certain_of(
    size: ModelSize, config: TrainConfig, *, mesh: MeshPlan, on_gloo: bool, is_drawn: bool
) -> list[CertainMemory]:
    """What every rank of this run holds for certain, moment by moment.

    Args:
        size: of the whole model; activations do not count.
        config: the run.
        mesh: its ranks.
        on_gloo: True for CPU ranks.
        is_drawn: True where each rank makes the whole model from the seed before it is cut.
    """
    plan = _rank_plan(config, mesh)
    if any(group.optimizer == "muon" for group in config.parameter_groups):
        plan = replace(plan, optimizer_bytes=MUON_BYTES)  # of some, which is all that is known without their names
    state = state_memory(size, plan)
    on_host = tuple(state.by_kind) if on_gloo else _ON_HOST[config.offload]
    whole = MemoryEstimate(by_kind={"parameters": FLOAT32_BYTES * size.parameters if is_drawn else 0})
    moments = [
        CertainMemory(place="device", moment="in every update", estimate=state.without(*on_host)),
        CertainMemory(place="host", moment="in every update", estimate=state.only(*on_host)),
        CertainMemory(place="host", moment="while the whole model is made from the seed", estimate=whole),
    ]
    return [moment for moment in moments if moment.estimate.peak_bytes]


def _rank_plan(config: TrainConfig, mesh: MeshPlan) -> RankPlan:
    gathered: Any = SUPPORT[config.precision].gathered
    return RankPlan(
        parallel=config.parallel,
        shard=mesh.shard * (1 if config.parallel == "ddp" else mesh.context),
        replicate=mesh.replicate,
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        context=mesh.context,
        schedule=config.mesh.schedule,
        recompute=config.activation_checkpointing,
        computed_bytes=FLOAT32_BYTES if gathered is None else gathered.itemsize,
        # Muon's are the matrices of blocks; embedding and head are AdamW's, and the norms of blocks are too few to
        # count.
        optimizer_bytes=ADAMW_BYTES if config.optimizer == "adamw" else MUON_BYTES,
        rest_optimizer_bytes=ADAMW_BYTES,
        average_bytes=FLOAT32_BYTES if config.ema is not None else 0,
        keeps_trained_only=config.lora is not None,
    )
