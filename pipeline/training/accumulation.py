"""Forward and backward over the micro-batches of one optimizer step.

Owns which rows go through the model when, and by what a loss is divided before its gradient is taken. Knows nothing of
optimizers, reports or checkpoints. The one decision: a loss is a sum over units, divided once by the units of the whole
step, so neither accumulation nor the number of ranks changes the gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pipeline.training.parallel.mesh import set_pass
from pipeline.training.parallel.pipeline import PipelineModel
from pipeline.training.session import Session
from pipeline.training.tasks.loss import to_device


def count_units(session: Session, rows: Any) -> int:
    """Units of a step over all ranks, which its loss is a mean over; all ranks call this together.

    Args:
        session: this rank.
        rows: what this rank trains on in this step, from `Task.rows`.

    Returns:
        The same on every rank; at least 1.
    """
    own = session.task.num_units(rows)
    if own is None:
        return session.plan.units_per_step
    total = torch.tensor(own, dtype=torch.int64, device=session.worker.torch_device)
    dist.all_reduce(total)
    # Ranks that cut the model have the same rows.
    return max(1, int(total) * session.mesh_plan.data_ranks // session.worker.world_size)


def accumulate(session: Session, rows: Any, *, units: int) -> torch.Tensor:
    """Leave the gradient of the step's mean loss, times the loss scale, in the model's parameters.

    Args:
        session: this rank.
        rows: what this rank trains on in this step, from `Task.rows`.
        units: from `count_units`.

    Returns:
        This rank's part of the sum of losses, float32 [], on the device: the parts of all ranks add up to it.
    """
    plan, worker, model = session.plan, session.worker, session.model
    # FSDP averages gradients over ranks; this turns the average of local sums into the mean over all units.
    scale = session.mesh_plan.gradient_ranks / units
    if session.loss_scale is not None:
        scale *= session.loss_scale.value
    # Ranks that compute one block together have the same loss.
    part = 1.0 / session.mesh_plan.tensor
    if isinstance(model, PipelineModel):
        inputs, targets = to_device(rows, worker)
        return part * model.accumulate(inputs, targets, micro_batches=plan.accumulation, scale=scale)
    total = torch.zeros((), device=worker.torch_device)
    for micro in range(plan.accumulation):
        if plan.accumulation > 1 and isinstance(model, FSDPModule):
            set_pass(model, session.mesh_plan, is_last=micro == plan.accumulation - 1)
        first = micro * plan.rows_per_micro_batch
        loss = session.task.loss_sum(model, rows, slice(first, first + plan.rows_per_micro_batch), worker)
        (loss * scale).backward()
        total += loss.detach()
    return total * part
