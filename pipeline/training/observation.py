"""What is observed of a training: metrics of a step, the held-out loss, the state that a checkpoint tells.

Owns the collectives and the words of these. Knows nothing of when something is due. The one decision: a validation is
the only part of training that may be left in the middle, because it changes nothing; it asks between two passes whether
the ranks want to end.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from pipeline.training.checkpoints.checkpoint import TrainingState
from pipeline.training.faults.requests import ENDING, Flag
from pipeline.training.reporter import Reporter
from pipeline.training.session import Session
from pipeline.training.step import StepOutcome


class AskedToEndError(Exception):
    """The ranks agreed, in the middle of a validation, to end; never leaves the loop."""

    def __init__(self, word: Flag) -> None:
        super().__init__(word)
        self.word = word


def report_step(session: Session, reporter: Reporter, outcome: StepOutcome, *, done: int) -> float:
    """Report the metrics of a step and the progress; the mean loss over all ranks' units."""
    total = outcome.loss_sum.double()
    dist.all_reduce(total)
    loss = float(total) / outcome.units
    rate, unit = session.speed.read_window(), session.task.unit
    values = {"learning_rate": outcome.learning_rate, f"{unit}s_per_second": rate}
    if math.isfinite(loss):
        values["loss"] = loss
    if math.isfinite(outcome.gradient_norm):
        values["gradient_norm"] = outcome.gradient_norm
    values["data_wait_seconds"] = session.speed.read_waits()
    values |= session.task.epochs(
        done + session.guard.non_finite.data_offset, plan=session.plan, seed=session.config.seed
    )
    age = session.checkpointer.history.age_seconds()
    if age is not None:
        values["checkpoint_age_seconds"] = age
    if session.loss_scale is not None:
        values["loss_scale"] = session.loss_scale.value
    mfu = session.speed.mfu(rate)
    if mfu is not None:
        values["mfu"] = mfu
    reporter.metrics(values, step=done)
    note = f"loss {loss:.2f}, {rate:,.0f} {unit}s/s"
    reporter.progress(done, total=session.config.steps, unit="steps", note=note)
    return loss


def validate(session: Session) -> dict[str, float]:
    """What the task measures, and the same of the average where there is one, as `ema_<name>`.

    Raises:
        AskedToEndError: on all ranks, where one was asked to end meanwhile.
    """
    session.guard.watchdog.waits_for("validation")
    measure = functools.partial(
        session.task.validate,
        session.model,
        session.worker,
        max_rows=session.config.validation_sequences,
        micro_batch_rows=session.plan.rows_per_micro_batch,
    )
    with _polled(session):
        values = measure()
        if session.average is None:
            return values
        with session.average.lent():
            return values | {f"ema_{name}": value for name, value in measure().items()}


@contextmanager
def _polled(session: Session) -> Iterator[None]:
    """Ask the ranks before each forward pass, which all of them run equally often."""

    def poll(module: nn.Module, inputs: Any) -> None:
        word = session.guard.poll()
        if word & ENDING:
            raise AskedToEndError(word)

    # In front of FSDP's own hook, so nothing is gathered when it raises.
    hook = session.model.register_forward_pre_hook(poll, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        session.model.train()


def make_state(
    session: Session, *, step: int, train_loss: float, validation: Mapping[str, float], initial: float
) -> TrainingState:
    """The state after `step` steps."""
    return TrainingState(
        step=step,
        units=session.units.total,
        seed=session.config.seed,
        world_size=session.worker.world_size,
        initial_validation_loss=initial,
        validation=dict(validation),
        train_loss=train_loss,
        identity=session.identity,
    )
