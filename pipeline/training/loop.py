"""The training loop of one rank.

Owns the order of things: open the session, resume, then steps with their reports, validations and checkpoints, and what
follows from what the ranks were asked for. Knows nothing of Ray, MLflow or flows. The one decision: everything a step
needs is a function of (config, step), so the loop has no state beside the model, the optimizer, the step number and the
counts of the guard.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeline.artifacts.store import open_store
from pipeline.errors import CheckpointError, Interrupted, PreemptedError, StageError, StoreError
from pipeline.training.checkpoints.checkpoint import Resumed, TrainingState
from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.failure import is_out_of_memory
from pipeline.training.faults import failpoints
from pipeline.training.faults.guard import make_watchdog
from pipeline.training.faults.out_of_memory import memory_error, note_smaller
from pipeline.training.faults.requests import ENDING, Flag, answered, ask, listening, reason_of
from pipeline.training.observation import AskedToEndError, make_state, report_step, validate
from pipeline.training.parallel.replicas import check_replicas
from pipeline.training.reporter import Reporter
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.step import StepOutcome, take_step
from pipeline.training.tasks.task import Unit
from pipeline.training.worker import WorkerContext, joined

SAVE_LIMIT = 1.25
"""A save may go on so many times as long as ranks wait in it for each other: those that wait give up first."""


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
    skipped_steps: int
    """Whose gradients were not finite."""


def train(
    worker: WorkerContext, job: TrainJob, *, reporter: Reporter, before_commit: Callable[[], None] = lambda: None
) -> TrainResult:
    """Train to `job.config.steps`, from the newest commit in the workspace or from initial weights.

    Args:
        worker: this rank.
        job: what is trained.
        reporter: of rank 0.
        before_commit: hands on what was reported; called from the thread that saves, and may not raise.

    Raises:
        ParameterError: the config cannot work here.
        StageError: gradients are not finite more often than the config allows, or memory is too small.
        CheckpointError: a checkpoint cannot be written, or none of those that exist can be read.
        ClusterError: reductions of this backend are wrong, or memory is too small and the next start will need less.
        PreemptedError: this rank or another was asked to make way.
        Interrupted: training was asked to stop.
    """
    faults, preemption, entered_at = job.config.faults, job.config.preemption, time.time()
    worker = replace(worker, collective_timeout_seconds=faults.group_timeout_seconds(worker.device))
    watchdog = make_watchdog(worker, faults=faults, preemption=preemption)
    with (
        failpoints.armed(os.environ, rank=worker.rank),
        listening(preemption.signals),
        watchdog.watching(),
        joined(worker),
    ):
        session = open_session(worker, job, watchdog=watchdog)
        session.checkpointer.before_commit = before_commit
        session.guard.restart.entered_at = entered_at
        session.guard.restart.ready_at = time.time()
        if session.room.warning:
            reporter.note(session.room.warning)
        with (
            _enough_memory(session, job),
            session.guard.heart.beating() if worker.is_first else _quiet(),
            contextlib.closing(session.checkpointer),
        ):
            return _run(session, reporter)


def advance(
    session: Session, reporter: Reporter, *, state: TrainingState, until: int
) -> tuple[TrainingState, CheckpointCommit | None]:
    """Take the steps from `state.step` to `until`, with the reports, validations and checkpoints that are due.

    Returns:
        The state at the last observed step, and the newest commit made here.
    """
    guard = session.guard
    commit: CheckpointCommit | None = None
    step = state.step
    while step < until:
        session.speed.start()
        if session.worker.is_first and session.checkpointer.is_due():
            ask(Flag.SAVE, reason="checkpoint_interval_seconds")
        guard.begin_step(step)
        outcome = take_step(session, step)
        word = guard.end_step(done=step + 1, is_finite=outcome.is_finite)
        session.speed.stop()
        failpoints.reach(failpoints.Place.STEP_DONE, step=step)
        if not outcome.is_finite:
            resumed = _after_bad_step(session, reporter, outcome, step=step)
            if resumed is not None:
                state, commit, step = resumed.state, resumed.commit, resumed.state.step
                continue
        step += 1
        session.units.add(outcome.units)
        recovery = guard.recovered(done=step, is_last=step == session.config.steps)
        if recovery:
            reporter.metrics(recovery, step=step)
        session.checkpointer.report(reporter)
        state, made = _observe(session, reporter, outcome, state=state, done=step, word=word)
        commit = made or commit
    return state, commit


def initial_state(session: Session, reporter: Reporter) -> TrainingState:
    """The state before the first step, with the validation loss of the initial weights."""
    try:
        validation = validate(session)
    except AskedToEndError as asked:
        raise _ending(session, asked.word, commit=None, done=0) from None
    initial = validation["validation_loss"]
    reporter.metrics(validation | {"initial_validation_loss": initial}, step=0)
    return make_state(session, step=0, train_loss=math.nan, validation=validation, initial=initial)


def _run(session: Session, reporter: Reporter) -> TrainResult:
    config, guard = session.config, session.guard
    guard.watchdog.waits_for("a checkpoint to resume from")
    failpoints.reach(failpoints.Place.LOAD)
    resumed = session.checkpointer.resume(reporter, identity=session.identity)
    commit = None
    check_replicas(session.model, session.mesh)
    if resumed is None:
        guard.restart.loaded_at = time.time()
        state = initial_state(session, reporter)
    else:
        state, commit = resumed.state, resumed.commit
        guard.restart.loaded_at = time.time()
        guard.resumed_step = state.step
        reporter.note(f"resumed from the checkpoint of step {state.step}")
    first_step = state.step
    guard.heart.beat(first_step)
    reporter.progress(first_step, total=config.steps, unit="steps", note=_start_note(session, first_step))
    if guard.validation_due:
        state, made = _validate_and_save(session, reporter, state, saves=state.step == config.steps)
        commit = made or commit
    state, made = advance(session, reporter, state=state, until=config.steps)
    session.checkpointer.report(reporter)
    commit = made or commit
    if commit is None:
        raise StageError("no step was run and no checkpoint exists", hint="`steps` must be at least 1")
    return TrainResult(
        state=state,
        commit=commit,
        num_parameters=session.room.num_parameters,
        unit=session.task.unit,
        units_per_second=session.speed.steady(),
        resumed_from_step=first_step,
        skipped_steps=guard.non_finite.skipped,
    )


def _observe(
    session: Session, reporter: Reporter, outcome: StepOutcome, *, state: TrainingState, done: int, word: Flag
) -> tuple[TrainingState, CheckpointCommit | None]:
    """Report, validate and save what is due after `done` steps; the new state, and the commit if one was made.

    Raises:
        PreemptedError: the ranks were asked to make way; what was due is done, and a checkpoint is committed.
        Interrupted: they were asked to stop; likewise.
    """
    config, guard = session.config, session.guard
    last = done == config.steps
    by_steps = config.checkpoint_interval_seconds is None and done % config.checkpoint_every_steps == 0
    # A commit among steps that were not finite is no good one to go back to.
    is_asked = by_steps or Flag.SAVE in word
    saves = last or (is_asked and outcome.is_finite) or bool(word & ENDING)
    validates = last or done % config.validate_every_steps == 0
    if not (saves or validates or done == 1 or done % config.log_every_steps == 0):
        return state, None
    train_loss = report_step(session, reporter, outcome, done=done)
    state = make_state(
        session, step=done, train_loss=train_loss, validation=state.validation, initial=state.initial_validation_loss
    )
    guard.validation_due = validates
    if validates and not word & ENDING:
        try:
            state = replace(state, validation=_validated(session, reporter, done=done))
        except AskedToEndError as asked:
            word, saves = word | asked.word, True
    commit = _save(session, state, waits=last or bool(word & ENDING)) if saves else None
    if saves:
        answered(word & Flag.SAVE)
    if word & ENDING and not (last and not guard.validation_due):
        raise _ending(session, word, commit=commit, done=done)
    return state, commit


def _validate_and_save(
    session: Session, reporter: Reporter, state: TrainingState, *, saves: bool
) -> tuple[TrainingState, CheckpointCommit | None]:
    """Make up for a validation that was cut short before the checkpoint that was resumed from."""
    try:
        state = replace(state, validation=_validated(session, reporter, done=state.step))
    except AskedToEndError as asked:
        raise _ending(session, asked.word, commit=None, done=state.step) from None
    return state, _save(session, state, waits=True) if saves else None


def _validated(session: Session, reporter: Reporter, *, done: int) -> dict[str, float]:
    values = validate(session)
    reporter.metrics(values, step=done)
    session.guard.validation_due = False
    return values


def _save(session: Session, state: TrainingState, *, waits: bool) -> CheckpointCommit | None:
    """Begin a checkpoint, and wait for its commit where nothing else is left to do; the newest one."""
    longest = SAVE_LIMIT * session.config.checkpoint_timeout_seconds
    session.guard.watchdog.waits_for("a checkpoint", own_limit=("checkpoint_timeout_seconds", longest))
    check_replicas(session.model, session.mesh)
    failpoints.reach(failpoints.Place.SAVE, step=state.step)
    session.guard.heart.saving(state.step)
    session.checkpointer.begin(state)
    commit = session.checkpointer.drain() if waits else session.checkpointer.history.newest
    session.guard.watchdog.progress()
    return commit


def _after_bad_step(session: Session, reporter: Reporter, outcome: StepOutcome, *, step: int) -> Resumed | None:
    """What follows a step that is not finite: None to go on behind it, or the checkpoint to go on from.

    Raises:
        StageError: it is one too many; all ranks raise it, for they see the same norm.
    """
    counts, config = session.guard.non_finite, session.config
    found = f"step {step + 1} of {config.steps}: the gradient norm is {outcome.gradient_norm}"
    rows = session.task.step_rows(step + counts.data_offset, plan=session.plan, seed=config.seed)
    where = "; ".join(f"rows of {name}: {', '.join(map(str, sorted(own)))}" for name, own in rows.items() if own)
    if counts.may_skip():
        reporter.note(f"{found}; skipped ({where}), {counts.in_a_row} in a row of {counts.policy.skip} allowed")
        reporter.metrics({"skipped_steps": float(counts.skipped)}, step=step + 1)
        return None
    good = step - counts.in_a_row + 1
    if counts.policy.then == "rollback":
        before = replace(counts)
        session.guard.watchdog.waits_for("a checkpoint to go back to")
        # That a save failed is no reason not to go back to one before it.
        with contextlib.suppress(CheckpointError, StoreError):
            session.checkpointer.drain()
        resumed = session.checkpointer.resume(reporter, identity=session.identity)
        if resumed is not None and counts.roll_back(before, to=resumed.state.step, step=step):
            reporter.note(f"{found} ({where}); back to step {resumed.state.step}, and on with the rows after these")
            reporter.metrics({"rollbacks": float(counts.rollbacks)}, step=step + 1)
            return resumed
        found += "; going back to the last commit did not help, or there is none"
    raise StageError(
        f"{found}; parameters are those of step {good} ({where})",
        hint="lower `learning_rate`, raise `warmup_steps`, look for damaged rows in the data, or let "
        "`faults: {non_finite: {skip: 3, then: rollback}}` leave them out",
    )


def _ending(session: Session, word: Flag, *, commit: CheckpointCommit | None, done: int) -> Exception:
    """The error that ends training where the ranks were asked to end."""
    flag = Flag.STOP if Flag.STOP in word else Flag.PREEMPT
    kept = f"{commit.key.prefix} is committed" if commit is not None else "there was nothing new to commit"
    asked = session.guard.agreement.gather(reason_of(flag))
    why = ", ".join(f"rank {rank} by {reason}" for rank, reason in enumerate(asked) if reason)
    text = f"training ended after step {done} of {session.config.steps}; asked: {why}; {kept}"
    answered(ENDING)
    if flag is Flag.STOP:
        return Interrupted(text, hint="run it again to go on from there")
    return PreemptedError(text, hint="run it again to go on from there; a flow's runner does so by itself")


@contextlib.contextmanager
def _enough_memory(session: Session, job: TrainJob) -> Iterator[None]:
    """Turn an allocator's error into one that names the rank, its peak and what follows."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        rows = session.plan.rows_per_micro_batch
        # What divides a micro-batch divides the rows of a rank too, also where the next start has fewer ranks.
        smaller = max((size for size in range(1, rows) if rows % size == 0), default=0)
        goes_on = job.config.faults.out_of_memory == "smaller_micro_batch" and smaller > 0
        if goes_on:
            asked_rows = job.config.micro_batch_sequences
            note_smaller(open_store(job.workspace), asked_rows=asked_rows, rows=smaller)
        raise memory_error(
            error,
            worker=session.worker,
            rows=rows,
            next_rows=smaller if goes_on else None,
            state_bytes=session.room.state_bytes,
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Of ranks without a pulse."""
    yield


def _start_note(session: Session, first_step: int) -> str:
    plan = session.plan
    start = f"from step {first_step}" if first_step else "from initial weights"
    return (
        f"{session.room.num_parameters:,} parameters {start}; a step is {plan.rows_per_step} rows over "
        f"{session.worker.world_size} ranks in {plan.accumulation} passes"
    )
