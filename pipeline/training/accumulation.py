"""Forward and backward over the micro-batches of one optimizer step.

Owns which rows go through the model when, and by what a loss is divided before its gradient is taken. Knows nothing of
optimizers, reports or checkpoints. The one decision: a loss is a sum over units, divided once by the units of the whole
step, so neither accumulation nor the number of ranks changes the gradient.
"""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from pipeline.training.parallel.mesh import set_pass
from pipeline.training.session import Session


def accumulate(session: Session, rows: Any) -> torch.Tensor:
    """Leave the gradient of the step's mean loss, times the loss scale, in the model's parameters.

    Args:
        session: this rank.
        rows: what this rank trains on in this step, from `Task.rows`.

    Returns:
        Sum of this rank's losses, float32 [], on the device.
    """
    plan, worker, model = session.plan, session.worker, session.model
    total = torch.zeros((), device=worker.torch_device)
    # FSDP averages gradients over ranks; this turns the average of local sums into the mean over all units.
    scale = worker.world_size / plan.units_per_step
    if session.loss_scale is not None:
        scale *= session.loss_scale.value
    for micro in range(plan.accumulation):
        if plan.accumulation > 1 and isinstance(model, FSDPModule):
            set_pass(model, session.mesh_plan, is_last=micro == plan.accumulation - 1)
        first = micro * plan.rows_per_micro_batch
        loss = session.task.loss_sum(model, rows, slice(first, first + plan.rows_per_micro_batch), worker)
        (loss * scale).backward()
        total += loss.detach()
    return total
