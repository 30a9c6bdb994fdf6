"""One optimizer step of one rank.

Owns the order inside a step: rows, gradients, clipping, update. Knows nothing of reports, checkpoints or what a bad
step leads to. The one decision: everything a step needs is a function of (config, step, how far the data has moved on),
and a step whose gradients are not finite changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from pipeline.training.accumulation import accumulate, count_units
from pipeline.training.faults.failpoints import Place, reach
from pipeline.training.session import Session
from pipeline.training.updates.optimizer import clip_gradients, set_learning_rate
from pipeline.training.updates.schedule import learning_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """One optimizer step of one rank."""

    loss_sum: torch.Tensor
    """Sum of this rank's losses, float32 []; on the device."""
    units: int
    """Tokens or examples that the loss of all ranks is a sum over."""
    gradient_norm: float
    """Global, before clipping; not finite where the step was skipped."""
    learning_rate: float
    is_finite: bool = True
    """False where the gradients were not finite, for a reason other than the loss scale; equal on every rank."""


def take_step(session: Session, step: int) -> StepOutcome:
    """Optimizer step `step` (from 0): accumulate, clip, update; parameters stay as they are where it is not finite."""
    config, worker, watchdog = session.config, session.worker, session.guard.watchdog
    watchdog.waits_for("data", step=step, detail=lambda: session.task.data_wait)
    reach(Place.DATA, step=step)
    position = step + session.guard.non_finite.data_offset
    with session.speed.waiting():
        rows = session.task.rows(position, plan=session.plan, worker=worker, seed=config.seed)
    watchdog.waits_for("forward and backward")
    units = count_units(session, rows)
    reach(Place.FORWARD, step=step)
    buffers = _buffers(session)
    total = accumulate(session, rows, units=units)
    if reach(Place.GRADIENTS, step=step):
        _spoil(session)
    scale = session.loss_scale
    if scale is not None:
        scale.unscale(session.parameters)
    norm = clip_gradients(session.parameters, max_norm=config.max_gradient_norm, stages=session.stages)
    rate = learning_rate(step, config)
    is_scale_too_large = scale is not None and scale.adapt(is_finite=math.isfinite(norm))
    is_finite = math.isfinite(norm) or is_scale_too_large
    if is_scale_too_large or not is_finite:
        session.optimizer.zero_grad()
        for buffer, before in buffers:
            buffer.copy_(before)
        session.task.settle(session.model, worker)
        return StepOutcome(loss_sum=total, units=units, gradient_norm=norm, learning_rate=rate, is_finite=is_finite)
    watchdog.waits_for("the update")
    reach(Place.UPDATE, step=step)
    set_learning_rate(session.optimizer, rate)
    session.optimizer.step()
    session.optimizer.zero_grad()
    if session.average is not None:
        session.average.update(done=step + 1)
    session.task.settle(session.model, worker)
    return StepOutcome(loss_sum=total, units=units, gradient_norm=norm, learning_rate=rate)


def _buffers(session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer and what it was, where a step may be skipped: running statistics take a bad forward pass in."""
    if not session.config.faults.non_finite.skip and session.loss_scale is None:
        return []
    return [(buffer, buffer.clone()) for buffer in session.model.buffers()]


def _spoil(session: Session) -> None:
    """Make one gradient of this rank not a number."""
    gradients = (parameter.grad for parameter in session.parameters if parameter.grad is not None)
    held = (item.to_local() if isinstance(item, DTensor) else item for item in gradients)
    next(item for item in held if item.numel()).view(-1)[:1] = math.nan
