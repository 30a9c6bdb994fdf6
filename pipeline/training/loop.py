"""The training loop of one rank.

Owns the order of things: open the session, resume, then steps with their reports, validations and checkpoints. Knows
nothing of Ray, MLflow or flows. The one decision: everything a step needs is a function of (config, step), so the loop
has no state beside the model, the optimizer and the step number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.errors import StageError
from pipeline.training.accumulation import accumulate
from pipeline.training.checkpoints.checkpoint import TrainingState
from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.reporter import Reporter
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.tasks.task import Unit
from pipeline.training.updates.optimizer import clip_gradients, set_learning_rate
from pipeline.training.updates.schedule import learning_rate
from pipeline.training.worker import WorkerContext, joined


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a finished training says, equal on every rank."""

    state: TrainingState
    commit: CheckpointCommit
    """The final checkpoint."""
    num_parameters: int
    unit: Unit
    """What the loss is a mean over."""
    units_per_second: float
    """By the median step of this process; 0 where all steps were done before."""
    resumed_from_step: int
    """0 where training started from initial weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """One optimizer step of one rank."""

    loss_sum: torch.Tensor
    """Sum of this rank's losses, float32 []; on the device."""
    gradient_norm: float
    """Global, before clipping."""
    learning_rate: float


def train(worker: WorkerContext, job: TrainJob, *, reporter: Reporter) -> TrainResult:
    """Train to `job.config.steps`, from the newest commit in the workspace or from initial weights.

    Raises:
        ParameterError: the config cannot work here.
        StageError: the loss is not finite.
        CheckpointError: a checkpoint cannot be written, or none of those that exist can be read.
        ClusterError: reductions of this backend are wrong.
    """
    with joined(worker):
        session = open_session(worker, job)
        return _run(session, reporter)


def take_step(session: Session, step: int) -> StepOutcome:
    """Optimizer step `step` (from 0): accumulate, clip, update.

    Raises:
        StageError: the gradient norm is not finite; all ranks raise it, for they see the same norm.
    """
    config, worker = session.config, session.worker
    rows = session.task.rows(step, plan=session.plan, worker=worker, seed=config.seed)
    total = accumulate(session, rows)
    norm = clip_gradients(session.parameters, max_norm=config.max_gradient_norm)
    if not math.isfinite(norm):
        raise StageError(
            f"step {step + 1} of {config.steps}: the gradient norm is {norm}; parameters are those of step {step}",
            hint="lower `learning_rate`, raise `warmup_steps`, or look for damaged rows in the data",
        )
    rate = learning_rate(step, config)
    set_learning_rate(session.optimizer, rate)
    session.optimizer.step()
    session.optimizer.zero_grad()
    session.task.settle(session.model, worker)
    return StepOutcome(loss_sum=total, gradient_norm=norm, learning_rate=rate)


def advance(
    session: Session, reporter: Reporter, *, state: TrainingState, until: int
) -> tuple[TrainingState, CheckpointCommit | None]:
    """Take the steps from `state.step` to `until`, with the reports, validations and checkpoints that are due.

    Returns:
        The state at the last observed step, and the newest commit made here.
    """
    config = session.config
    commit: CheckpointCommit | None = None
    for step in range(state.step, until):
        session.speed.start()
        outcome = take_step(session, step)
        session.speed.stop()
        done = step + 1
        last = done == config.steps
        saves = last or done % config.checkpoint_every_steps == 0
        validates = last or done % config.validate_every_steps == 0
        if not (saves or validates or done == 1 or done % config.log_every_steps == 0):
            continue
        train_loss = report_step(session, reporter, outcome, done=done)
        validation = state.validation
        if validates:
            validation = _validate(session)
            reporter.metrics(validation, step=done)
        state = _state(
            session, step=done, train_loss=train_loss, validation=validation, initial=state.initial_validation_loss
        )
        if saves:
            commit = session.checkpointer.save(state)
    return state, commit


def initial_state(session: Session, reporter: Reporter) -> TrainingState:
    """The state before the first step, with the validation loss of the initial weights."""
    validation = _validate(session)
    initial = validation["validation_loss"]
    reporter.metrics(validation | {"initial_validation_loss": initial}, step=0)
    return _state(session, step=0, train_loss=math.nan, validation=validation, initial=initial)


def _run(session: Session, reporter: Reporter) -> TrainResult:
    config = session.config
    resumed = session.checkpointer.resume(reporter, identity=config.identity())
    if resumed is None:
        state = initial_state(session, reporter)
    else:
        state = resumed.state
        reporter.note(f"resumed from the checkpoint of step {state.step}")
    first_step = state.step
    reporter.progress(first_step, total=config.steps, unit="steps", note=_start_note(session, first_step))
    state, commit = advance(session, reporter, state=state, until=config.steps)
    if commit is None and resumed is not None:
        commit = resumed.commit
    if commit is None:
        raise StageError("no step was run and no checkpoint exists", hint="`steps` must be at least 1")
    return TrainResult(
        state=state,
        commit=commit,
        num_parameters=session.num_parameters,
        unit=session.task.unit,
        units_per_second=session.speed.steady(),
        resumed_from_step=first_step,
    )


def report_step(session: Session, reporter: Reporter, outcome: StepOutcome, *, done: int) -> float:
    """Report the metrics of a step and the progress; the mean loss over all ranks' units."""
    total = outcome.loss_sum.double()
    dist.all_reduce(total)
    loss = float(total) / session.plan.units_per_step
    rate, unit = session.speed.read_window(), session.task.unit
    values = {
        "loss": loss,
        "learning_rate": outcome.learning_rate,
        "gradient_norm": outcome.gradient_norm,
        f"{unit}s_per_second": rate,
    }
    mfu = session.speed.mfu(rate)
    if mfu is not None:
        values["mfu"] = mfu
    reporter.metrics(values, step=done)
    note = f"loss {loss:.2f}, {rate:,.0f} {unit}s/s"
    reporter.progress(done, total=session.config.steps, unit="steps", note=note)
    return loss


def _validate(session: Session) -> dict[str, float]:
    return session.task.validate(
        session.model,
        session.worker,
        max_rows=session.config.validation_sequences,
        micro_batch_rows=session.plan.rows_per_micro_batch,
    )


def _state(
    session: Session, *, step: int, train_loss: float, validation: Mapping[str, float], initial: float
) -> TrainingState:
    return TrainingState(
        step=step,
        units=step * session.plan.units_per_step,
        seed=session.config.seed,
        world_size=session.worker.world_size,
        initial_validation_loss=initial,
        validation=dict(validation),
        train_loss=train_loss,
        identity=session.config.identity(),
    )


def _start_note(session: Session, first_step: int) -> str:
    plan = session.plan
    start = f"from step {first_step}" if first_step else "from initial weights"
    return (
        f"{session.num_parameters:,} parameters {start}; a step is {plan.rows_per_step} rows over "
        f"{session.worker.world_size} ranks in {plan.accumulation} passes"
    )
