"""From what a run is to what the arithmetic of its memory asks.

Owns the translation of a config and a mesh. Knows nothing of how bytes are added up. The one decision: bytes of one
parameter come from the config's own words, so a new precision or optimizer has one place here.
"""

from typing import Any

from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.parallel.memory_estimate import (
    ADAMW_BYTES,
    FLOAT32_BYTES,
    MUON_BYTES,
    MemoryEstimate,
    ModelSize,
    RankPlan,
    estimate_memory,
)
from pipeline.training.parallel.mesh import MeshPlan
from pipeline.training.precision import SUPPORT


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
    gathered: Any = SUPPORT[config.precision].gathered
    # Muon's are the matrices of blocks; embedding and head are AdamW's, and the norms of blocks are too few to count.
    optimizer = ADAMW_BYTES if config.optimizer == "adamw" else MUON_BYTES
    average = FLOAT32_BYTES if config.ema is not None else 0
    estimate = estimate_memory(
        size,
        RankPlan(
            parallel=config.parallel,
            shard=mesh.shard * (1 if config.parallel == "ddp" else mesh.context),
            replicate=mesh.replicate,
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            context=mesh.context,
            schedule=config.mesh.schedule,
            accumulation=batch.accumulation,
            recompute=config.activation_checkpointing,
            computed_bytes=FLOAT32_BYTES if gathered is None else gathered.itemsize,
            optimizer_bytes=optimizer + average,
            rest_optimizer_bytes=ADAMW_BYTES + average,
            on_gloo=on_gloo,
            keeps_snapshot=keeps_snapshot,
            keeps_trained_only=config.lora is not None,
        ),
    )
    if on_gloo:
        return estimate
    offloaded = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "parameters", "gradients")}
    return estimate.without("snapshot", *offloaded[config.offload])  # type: ignore[arg-type]
