"""What spawned ranks run in tests, and datasets that misbehave. Importable by name from other processes."""

import contextlib
import functools
import os
import resource
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError
from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.config import MeshSizes
from pipeline.training.loop import TrainResult, take_step, train
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import TrainJob, open_session
from pipeline.training.worker import WorkerContext, joined


@dataclass
class Recorder:
    """A reporter that keeps what it is told."""

    values: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    progressed: list[tuple[float, str]] = field(default_factory=list)

    def metrics(self, values: Any, *, step: int | None = None) -> None:
        self.values.append((step, dict(values)))

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        self.progressed.append((done, note))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def series(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.values if step is not None and name in values}


class StoppedError(Exception):
    """Training was stopped by the test."""


class StoppingRows:
    """A dataset that cannot be read from one step on."""

    def __init__(
        self, path: Path, *, stop_at: int, rank: int | None = None, how: str = "raise", opened: Any = PackedDataset
    ) -> None:
        self._rows = opened.open(path, verify=False)
        self._stop_at, self._rank, self._how = stop_at, rank, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> np.ndarray:
        if step == self._stop_at and self._rank in (None, rank):
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise StoppedError(f"no rows for step {step}")
        return self._rows.train_rows(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size, seed=seed)


class OnceStoppingRows(StoppingRows):
    """Stops the first process that gets there, and no later one: a mark in the file system remembers."""

    def __init__(self, path: Path, *, mark: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._mark = mark

    def train_rows(self, step: int, **options: Any) -> np.ndarray:
        if step == self._stop_at and options["rank"] == self._rank:
            try:
                self._mark.touch(exist_ok=False)
            except FileExistsError:
                return self._rows.train_rows(step, **options)
        else:
            return self._rows.train_rows(step, **options)
        return super().train_rows(step, **options)


def stored_tensors(workspace: str | Path, commit: CheckpointCommit) -> dict[str, Any]:
    """Everything in a committed checkpoint, by name, read without ranks."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(str(Path(workspace, commit.key.prefix, "dcp"))),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat: dict[str, Any] = {}
    _flatten(state, "", flat)
    return flat


def _flatten(value: Any, prefix: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _flatten(item, f"{prefix}{name}/", into)
    else:
        into[prefix.rstrip("/")] = value


def train_recorded(worker: WorkerContext, job: TrainJob) -> tuple[TrainResult, Recorder]:
    """One training; what rank 0 reported."""
    recorder = Recorder()
    result = train(worker, job, reporter=recorder if worker.is_first else SilentReporter())
    return result, recorder


class Tightening(SilentReporter):
    """Of a rank whose process gets no more memory than so much above what it has after two steps.

    Not after one: in the second, malloc still reserves 64 MB for a thread here and there.
    """

    def __init__(self, more_bytes: int) -> None:
        self._more_bytes = more_bytes
        self._steps = 0

    def metrics(self, values: Any, *, step: int | None = None) -> None:
        self._steps += "loss" in values
        if self._steps == 2:
            limit_address_space(self._more_bytes)


def limit_address_space(more_bytes: int) -> None:
    """Let this process have so much more address space than it has now, and no more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_resident("VmSize") + more_bytes, hard))


def train_in_little_memory(worker: WorkerContext, job: TrainJob, more_bytes: int) -> tuple[TrainResult, Recorder]:
    """One training in which rank 1 has little memory left after two steps; what rank 0 reported."""
    recorder = Recorder()
    return train(worker, job, reporter=recorder if worker.is_first else Tightening(more_bytes)), recorder


def refused_for_memory(worker: WorkerContext, job: TrainJob, more_bytes: int) -> tuple[str, int]:
    """What a rank is told of a model that is too large, and how much memory it took to find that out.

    Rank 1 alone has a limit of its own.
    """
    if not worker.is_first:
        limit_address_space(more_bytes)
    before = _resident("VmRSS")
    try:
        train(worker, job, reporter=SilentReporter())
    except ParameterError as error:
        return str(error), _resident("VmRSS") - before
    return "", 0


def straight_and_interrupted(
    worker: WorkerContext, straight: TrainJob, stopped: TrainJob, resumed: TrainJob
) -> tuple[TrainResult, Recorder, TrainResult, Recorder, list[float]]:
    """Train straight; train until the rows stop; resume; and one step's gradient norm and loss as seen here."""
    with joined(worker):
        inner = replace(worker, store_address=None)
        first, first_record = train_recorded(inner, straight)
        try:
            train_recorded(inner, stopped)
        except StoppedError:
            dist.barrier()
        second, second_record = train_recorded(inner, resumed)
        session = open_session(inner, straight)
        outcome = take_step(session, 0)
        total = outcome.loss_sum.double()
        dist.all_reduce(total)
    return first, first_record, second, second_record, [outcome.gradient_norm, float(total)]


def module_ranks(
    worker: WorkerContext, straight: TrainJob, stopped: TrainJob, resumed: TrainJob
) -> tuple[Any, dict[str, list], dict[str, list]]:
    """As above for a module of the user's own; and buffers after one forward pass, before and after `settle`."""
    with joined(worker):
        inner = replace(worker, store_address=None)
        trained = straight_and_interrupted(inner, straight, stopped, resumed)
        session = open_session(inner, straight)
        rows = session.task.rows(0, plan=session.plan, worker=inner, seed=0)
        session.task.loss_sum(session.model, rows, slice(0, 4), inner)

        def buffers() -> dict[str, list]:
            return {name: buffer.tolist() for name, buffer in session.model.named_buffers()}

        before = buffers()
        session.task.settle(session.model, inner)
    return trained, before, buffers()


def fail_on_rank(worker: WorkerContext, rank: int, how: str) -> int:
    """Rank `rank` raises or dies while the others wait for it in a collective."""
    with joined(worker):
        if worker.rank == rank:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bug of rank 1")
        dist.all_reduce(torch.ones(1))
    return worker.rank


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """What a rank saw of trainings that start from stored weights."""

    full: TrainResult
    cut: list[TrainResult]
    """The same weights on a tensor axis, and as a pipeline."""
    straight: TrainResult
    resumed: TrainResult
    without_dropout: TrainResult
    shard_bytes: int
    """Of a large model's parameters on this rank."""
    peak_bytes: int | None
    """Resident at most while they were placed, above what was resident before; None where that cannot be measured."""


def fine_tuned_on_ranks(
    worker: WorkerContext, full: TrainJob, straight: TrainJob, resumed: TrainJob, rows: str, large: TrainJob
) -> FineTuned:
    """Train all parameters; adapters straight, and stopped and resumed, and without dropout; place a large model."""
    with joined(worker):
        inner = replace(worker, store_address=None)
        of_all = train(inner, full, reporter=SilentReporter())
        cut = []
        for axis in ("tensor", "pipeline"):
            config = replace(full.config, mesh=MeshSizes(**{axis: 2}), steps=1)
            job = replace(full, config=config, workspace=f"{full.workspace}-{axis}")
            cut.append(train(inner, job, reporter=SilentReporter()))
        first = train(inner, straight, reporter=SilentReporter())
        stopped = replace(resumed, open_dataset=functools.partial(StoppingRows, Path(rows), stop_at=4))
        try:
            train(inner, stopped, reporter=SilentReporter())
        except StoppedError:
            dist.barrier()
        second = train(inner, resumed, reporter=SilentReporter())
        assert straight.config.lora is not None
        plain = replace(straight.config, lora=replace(straight.config.lora, dropout=0.0), steps=3)
        third = train(
            inner,
            replace(straight, config=plain, workspace=f"{straight.workspace}-plain"),
            reporter=SilentReporter(),
        )
        before = None
        with contextlib.suppress(OSError):  # where the file is not there or may not be written, nothing is measured
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = _resident("VmHWM")
        session = open_session(inner, large)
        peak = None if before is None else _resident("VmHWM") - before
    held = sum(parameter.to_local().nbytes for parameter in session.model.parameters())
    return FineTuned(
        full=of_all,
        cut=cut,
        straight=first,
        resumed=second,
        without_dropout=third,
        shard_bytes=held,
        peak_bytes=peak,
    )


def _resident(field_name: str) -> int:
    """Bytes of this process by a field of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field_name}:"))


def note_and_wait(worker: WorkerContext, directory: str) -> None:
    """Leave this process's number in the name of a file, and never end."""
    Path(directory, f"rank-{os.getpid()}").touch()
    time.sleep(3600)
