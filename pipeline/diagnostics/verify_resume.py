"""`pipeline verify-resume`: does a training that was killed and resumed give what a straight one gives?

Owns the experiment: one straight training, one that a rank's SIGKILL ends at each chosen step and that then resumes,
and one that goes on with another number of ranks. Knows nothing of flows or Ray. The one decision: at the same number
of ranks everything must be equal to the bit (losses, rows, parameters, optimizer, RNG); at another one the rows must be
the same and the losses within a stated tolerance, because float32 sums come in another order. Where the model draws
random numbers, other ranks draw others, and their losses are shown but not judged.
"""

import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import ClusterError, ParameterError, StageError
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.checkpoints.rng import has_drawn
from pipeline.training.checkpoints.state_difference import state_differences, state_distances
from pipeline.training.config import MeshSizes, TrainConfig
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import train
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.start.weights import StartingWeights
from pipeline.training.tasks.watched_rows import Kill, RowLog, WatchedRows, read_rows
from pipeline.training.worker import WorkerContext, joined

OTHER_WORLD_TOLERANCE = 1e-3
"""Relative, of a loss and of a kind of state: float32 sums in another order, amplified by the steps that follow."""
TIMEOUT_SECONDS = 3600.0
NUM_KILLS = 3
_ELSEWHERE = "elsewhere"
"""Workspace of the other number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one training left."""

    commit: CheckpointCommit
    resumed_from: int
    losses: dict[int, float]
    """Of every step that this start took, by the number of steps done."""
    draws: bool
    """The model draws random numbers in training, as dropout does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeCase:
    """One interruption and what came of it."""

    killed_at: int
    """The step (from 0) whose rows the killed rank asked for."""
    world_size: int
    """Ranks that resumed."""
    resumed_from: int
    loss_error: float
    """Largest relative error of a loss after resuming."""
    state_error: float
    """Largest relative distance of a kind of state at the end (parameters, optimizer, ...); 0 where it is bit-equal."""
    problems: tuple[str, ...]
    """What is not as it must be; empty where all is."""

    @property
    def ok(self) -> bool:
        """True where nothing differs."""
        return not self.problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeReport:
    """Every interruption."""

    steps: int
    world_size: int
    checkpoint_every_steps: int
    draws: bool
    """The model draws random numbers; losses and state at another number of ranks are not judged."""
    cases: tuple[ResumeCase, ...]

    @property
    def ok(self) -> bool:
        """True where every case is."""
        return all(case.ok for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.ok, "cases": [{**asdict(case), "ok": case.ok} for case in self.cases]}


def default_kills(steps: int) -> tuple[int, ...]:
    """Steps early, in the middle and late, away from the first one, where there is nothing to resume."""
    return tuple(sorted({max(1, steps * (index + 1) // (NUM_KILLS + 1)) for index in range(NUM_KILLS)}))


def config_at(config: TrainConfig, *, world_size: int) -> TrainConfig:
    """The same training on so many ranks; on a mesh that cuts nothing where its axes do not divide them."""
    return config if world_size % config.mesh.model_ranks == 0 else replace(config, mesh=MeshSizes())


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What is trained, and where."""

    config: TrainConfig
    """Its `steps` and `checkpoint_every_steps` are those of the experiment."""
    open_dataset: Callable[[], Any]
    """Opens the dataset in a rank's process; must pickle."""
    project_root: str
    """Where the user's own modules are."""
    work: Path
    """An empty directory."""
    open_initial: Callable[[], StartingWeights] | None = None
    """Opens the weights that training starts from, in a rank's process; must pickle."""
    device: Literal["cpu", "cuda"] = "cpu"

    def job(self, name: str, *, log: str | None = None, kill: Kill | None = None) -> TrainJob:
        """A training in the workspace `name`, whose rows are logged as `log`."""
        rows = self.rows_of(log or name)
        return TrainJob(
            config=self.config,
            workspace=str(self.work / name / "workspace"),
            open_dataset=functools.partial(WatchedRows, self.open_dataset, log_directory=rows, kill=kill),
            open_initial=self.open_initial,
            project_root=self.project_root,
        )

    def rows_of(self, log: str) -> Path:
        """Where rows are logged."""
        return self.work / log / "rows"

    def train(self, jobs: Sequence[TrainJob], *, world_size: int) -> list[Trained]:
        """Train the jobs one after the other on fresh ranks."""
        ranks = spawn(train_all, jobs, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS, device=self.device)
        trained: list[Trained] = ranks[0]
        return trained


def verify_resume(
    experiment: Experiment,
    *,
    world_size: int,
    other_world_size: int | None,
    kills: Sequence[int],
    notice: Callable[[str], None] = lambda text: None,
) -> ResumeReport:
    """Run the experiment with ranks of this machine.

    Args:
        experiment: what is trained.
        world_size: ranks that are killed and that resume.
        other_world_size: ranks that go on from the last kill's checkpoint; None leaves that out.
        kills: steps (from 0) at which a rank is killed.
        notice: told what begins.

    Raises:
        ParameterError: a step to kill at is not one of the run's, all are before the first checkpoint, or the other
            number of ranks is the same one.
        PipelineError: what a training raised that was not killed.
    """
    config = experiment.config
    kills = sorted(set(kills))
    _check(config, kills, world_size=world_size, other_world_size=other_world_size)
    notice(f"{config.steps} steps straight on {world_size} ranks")
    (straight,) = experiment.train([experiment.job("straight")], world_size=world_size)
    for index, step in enumerate(kills):
        kill = Kill(step=step, rank=index % (world_size // config.mesh.model_ranks))  # by its share of the data
        notice(f"killing rank {kill.rank} at step {step}")
        _die(experiment, experiment.job(f"kill-{step}", kill=kill), world_size=world_size)
    if other_world_size is not None:  # before the others resume: it needs the checkpoints as the kill left them
        shutil.copytree(experiment.work / f"kill-{kills[-1]}", experiment.work / _ELSEWHERE)
    notice(f"resuming {len(kills)} times on {world_size} ranks")
    resumed = experiment.train([experiment.job(f"kill-{step}") for step in kills], world_size=world_size)
    judge = functools.partial(_judge, experiment, straight=straight)
    cases = [
        judge(trained, killed_at=step, log=f"kill-{step}", world_size=world_size, is_same=True)
        for step, trained in zip(kills, resumed, strict=True)
    ]
    if other_world_size is not None:
        notice(f"going on with {other_world_size} rank(s)")
        there = replace(experiment, config=config_at(config, world_size=other_world_size))
        (moved,) = there.train([there.job(_ELSEWHERE, log="moved")], world_size=other_world_size)
        cases.append(judge(moved, killed_at=kills[-1], log="moved", world_size=other_world_size, is_same=False))
    return ResumeReport(
        steps=config.steps,
        world_size=world_size,
        checkpoint_every_steps=config.checkpoint_every_steps,
        draws=straight.draws,
        cases=tuple(cases),
    )


def train_all(worker: WorkerContext, jobs: Sequence[TrainJob]) -> list[Trained]:
    """Train one job after the other in one process group; called in each rank."""
    found = []
    with joined(worker):
        inner = replace(worker, store_address=None)
        for job in jobs:
            reporter = BufferedReporter()
            result = train(inner, job, reporter=reporter if worker.is_first else SilentReporter())
            losses = {
                report.step: report.payload["loss"]
                for report in reporter.drain()
                if report.kind == "metrics" and report.step is not None and "loss" in report.payload
            }
            found.append(
                Trained(
                    commit=result.commit,
                    resumed_from=result.resumed_from_step,
                    losses=losses,
                    draws=has_drawn(worker, seed=job.config.seed),
                )
            )
    return found


def _check(config: TrainConfig, kills: Sequence[int], *, world_size: int, other_world_size: int | None) -> None:
    """Refuse what would show nothing; errors as `verify_resume`."""
    wrong = [step for step in kills if not 0 <= step < config.steps]
    if wrong:
        raise ParameterError(
            f"cannot kill at step {', '.join(map(str, wrong))}: the run has steps 0 to {config.steps - 1}"
        )
    if not any(_due(config, step) for step in kills):
        raise ParameterError(
            f"killing at step {', '.join(map(str, kills))} comes before the first checkpoint, at step "
            f"{config.checkpoint_every_steps}, so nothing would be resumed",
            hint="kill later, or save more often (--checkpoint-every)",
        )
    if other_world_size == world_size:
        raise ParameterError(
            f"going on with {world_size} rank(s) is what killed trainings do anyway",
            hint="give another number of ranks as --other-workers, or 0 for none",
        )


def _due(config: TrainConfig, killed_at: int) -> int:
    """Step of the newest checkpoint that a training killed there must have committed; 0 before the first."""
    return killed_at // config.checkpoint_every_steps * config.checkpoint_every_steps


def _die(experiment: Experiment, job: TrainJob, *, world_size: int) -> None:
    """Run a training that must not survive.

    Raises:
        StageError: it did.
    """
    try:
        experiment.train([job], world_size=world_size)
    except ClusterError as error:
        if " died" not in error.message:
            raise
        return  # a rank died; the other lost contact
    raise StageError("a training whose rank was to be killed came to its end", hint="this is a fault of the experiment")


def _judge(
    experiment: Experiment,
    trained: Trained,
    *,
    straight: Trained,
    killed_at: int,
    log: str,
    world_size: int,
    is_same: bool,
) -> ResumeCase:
    problems = []
    due = _due(experiment.config, killed_at)
    if trained.resumed_from != due:
        problems.append(f"resumed from step {trained.resumed_from}, and the newest checkpoint was due at step {due}")
    expected = {done: loss for done, loss in straight.losses.items() if done > trained.resumed_from}
    errors = [
        abs(trained.losses[done] - loss) / max(abs(loss), 1e-12)
        for done, loss in expected.items()
        if done in trained.losses
    ]
    loss_error = max((math.inf if math.isnan(error) else error for error in errors), default=0.0)
    if trained.losses.keys() != expected.keys():
        problems.append(f"steps: losses of {sorted(trained.losses)}, not of {sorted(expected)}")
    if is_same and trained.losses != expected:
        problems.append(f"losses: differ by up to {loss_error:.1e}")
    elif loss_error > OTHER_WORLD_TOLERANCE and not straight.draws:
        problems.append(f"losses: differ by up to {loss_error:.1e}; {OTHER_WORLD_TOLERANCE:.0e} is allowed")
    first = 0 if is_same else trained.resumed_from  # the log of other ranks begins where they go on
    rows = {at: ranks for at, ranks in read_rows(experiment.rows_of("straight")).items() if at >= first}
    problems += _row_problems(rows, read_rows(experiment.rows_of(log)), is_same=is_same)
    kept: dict[str, Any] = {"other_workspace": experiment.job("straight").workspace, "other": straight.commit}
    place = experiment.job(log if is_same else _ELSEWHERE).workspace
    distances = {} if is_same else state_distances(place, trained.commit, **kept)
    if is_same:
        problems += state_differences(place, trained.commit, **kept)
    elif not straight.draws:
        problems += [
            f"{kind}: {distance:.1e} apart; {OTHER_WORLD_TOLERANCE:.0e} is allowed"
            for kind, distance in distances.items()
            if distance > OTHER_WORLD_TOLERANCE
        ]
    return ResumeCase(
        killed_at=killed_at,
        world_size=world_size,
        resumed_from=trained.resumed_from,
        loss_error=loss_error,
        state_error=max(distances.values(), default=0.0),
        problems=tuple(problems),
    )


def _row_problems(expected: RowLog, found: RowLog, *, is_same: bool) -> list[str]:
    """Steps whose rows were others, by rank, or over all ranks where their number has changed."""

    def seen(log: RowLog, step: int) -> Any:
        ranks = log.get(step, [])
        return ranks if is_same else sorted(row for rows in ranks for row in rows)

    different = [step for step in expected if seen(found, step) != seen(expected, step)]
    return [f"rows: other ones at step {', '.join(map(str, different))}"] if different else []
