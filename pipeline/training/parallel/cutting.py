"""From a whole model to what one rank has of it.

Owns the order of the techniques. Knows nothing of data or optimizers. The one decision: tensor first, for its hooks are
inside blocks; then context, which replaces attention; then pipeline, which takes blocks out; and FSDP last, over what
is left, so that it is the same on every mesh.
"""

import torch
from torch import nn

from pipeline.training.config import TrainConfig
from pipeline.training.parallel.context import attend_across
from pipeline.training.parallel.mesh import CONTEXT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh, pipeline_line
from pipeline.training.parallel.pipeline import STAGES_PER_RANK, Loss, PipelineModel, blocks_of_stages, check_stages
from pipeline.training.parallel.sharding import shard_model
from pipeline.training.parallel.tensor import parallelize
from pipeline.training.precision import mixed_precision
from pipeline.training.worker import WorkerContext


def cut_model(
    model: nn.Module, mesh: Mesh, *, blocks: list[nn.Module], config: TrainConfig, worker: WorkerContext, loss: Loss
) -> nn.Module:
    """This rank's part of the model, sharded; called by all ranks together.

    Args:
        model: the whole; every rank has the same values, or all are on the meta device.
        mesh: of all ranks.
        blocks: submodules that become a group of FSDP each.
        config: the run.
        worker: this rank.
        loss: of logits and targets, for the last stage of a pipeline.

    Raises:
        ParameterError: all that a stage of a pipeline has is frozen.
    """
    check_stages(model, config)
    tensor, context, line = mesh.axis(TENSOR_AXIS), mesh.axis(CONTEXT_AXIS), pipeline_line(mesh, worker)
    if tensor is not None:
        num_stages = mesh.plan.pipeline * STAGES_PER_RANK[config.mesh.schedule] if line else 1
        cuts = blocks_of_stages(len(blocks), num_stages)
        parallelize(
            model,
            tensor,
            takes_whole={cut.start for cut in cuts},
            gives_whole={cut.stop - 1 for cut in cuts[:-1]},
        )
    if context is not None:
        attend_across(model, context.get_group())
    if line is None:
        _shard(model, mesh, blocks=blocks, config=config)
        return model
    piped = PipelineModel(
        model,
        rank=mesh.place(PIPELINE_AXIS),
        group=line[0],
        ends=line[1],
        schedule=config.mesh.schedule,
        loss=loss,
        device=worker.torch_device,
    )
    piped.dtype = mixed_precision(config.precision).param_dtype or torch.float32
    for stage in piped.stages:
        _shard(stage.module, mesh, blocks=[blocks[index] for index in stage.blocks], config=config)
    return piped


def _shard(module: nn.Module, mesh: Mesh, *, blocks: list[nn.Module], config: TrainConfig) -> None:
    shard_model(
        module,
        mesh.fsdp,
        blocks=blocks,
        precision=config.precision,
        reshard_after_forward=mesh.plan.reshards_after_forward,
        offloads=config.offload == "all",
    )
