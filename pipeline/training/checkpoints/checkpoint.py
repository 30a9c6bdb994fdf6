"""Saving and loading the state of a training run.

Owns what a checkpoint holds (model, optimizer, RNG of each rank, position, the model's description) and how ranks agree
on it. Knows nothing of when to save. The one decision: torch.distributed.checkpoint writes the bytes, and the commit
protocol of `checkpoints/commit.py` alone says whether they count; DCP's own metadata file is no commit mark.

The DCP state dict is `{"model": ..., "optimizer": ..., "extras": {<name>: ...}}`, so model tensors are keys
`model.<name in torch>`.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from pipeline.artifacts.manifest import FileEntry, sha256_of
from pipeline.artifacts.store import Store
from pipeline.errors import CheckpointError, PipelineError
from pipeline.training.checkpoints.commit import (
    AttemptKey,
    CheckpointCommit,
    claim_generation,
    commit,
    find_resumable,
    retain,
    write_vote,
)
from pipeline.training.parallel.tied_parameters import tied_names
from pipeline.training.reporter import Reporter
from pipeline.training.worker import WorkerContext

DCP_DIRECTORY = "dcp"
STATE_NAME = "state.json"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
STATE_SCHEMA = 2

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What `state.json` says. The data position is `step` itself: rows are a function of (seed, step)."""

    step: int
    """Optimizer steps done."""
    units: int
    """Tokens or examples trained on."""
    seed: int
    world_size: int
    initial_validation_loss: float
    validation: Mapping[str, float]
    """`validation_loss` and what else was measured with it."""
    train_loss: float
    identity: Mapping[str, Any]
    """`TrainConfig.identity()` of the run that wrote it."""
    schema: int = STATE_SCHEMA

    @property
    def validation_loss(self) -> float:
        """Mean over units of the held-out rows."""
        return self.validation["validation_loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What training goes on from."""

    state: TrainingState
    commit: CheckpointCommit


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Saves and resumes for one start of training; every method is called by all ranks together."""

    store: Store
    worker: WorkerContext
    model: nn.Module
    optimizer: torch.optim.Optimizer
    generation: int
    keep: int
    companions: Mapping[str, bytes]
    """Files kept beside the state: `config.json` and `tokenizer.json`, or `module.json`."""
    trained_only: bool = False
    """True where parameters that are not trained are left out, because they come from elsewhere at every start."""
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    """What else is saved and restored, by name. A `state_dict()` holds DTensors, or values that are equal on all ranks;
    its keys may not depend on how far training is, for they are asked for before the checkpoint is read."""

    def save(self, state: TrainingState) -> CheckpointCommit:
        """Write and commit a checkpoint; blocks until it is durable on every rank.

        Raises:
            CheckpointError: a rank could not write; names the rank. Earlier commits are untouched.
        """
        key = _from_first(self.worker, lambda: AttemptKey.new(step=state.step, generation=self.generation))
        directory = _staging_directory(self.store, key)
        held = self._held()
        _together(
            self.worker,
            lambda: dcp.save(
                held,
                storage_writer=dcp.FileSystemWriter(str(directory / DCP_DIRECTORY)),
            ),
            doing=f"write step {state.step}",
        )
        _together(self.worker, lambda: self._vote(key, directory, state), doing=f"vote for step {state.step}")
        made: CheckpointCommit = _from_first(
            self.worker, lambda: commit(self.store, key, world_size=self.worker.world_size)
        )
        if self.worker.is_first:
            retain(self.store, keep=self.keep, generation=self.generation)
        return made

    def _held(self) -> dict[str, dict[str, Any]]:
        """The DCP state dict; a tied tensor is held once, under its first name."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer, options=self._options)
        for name in tied_names(self.model):
            model_state.pop(name, None)
        held = {"model": model_state, "optimizer": optimizer_state}
        if self.extras:
            held["extras"] = {name: extra.state_dict() for name, extra in self.extras.items()}
        return held

    @property
    def _options(self) -> StateDictOptions:
        return StateDictOptions(ignore_frozen_params=self.trained_only, strict=not self.trained_only)

    def _vote(self, key: AttemptKey, directory: Path, state: TrainingState) -> None:
        rank = self.worker.rank
        torch.save(_rng_state(self.worker), directory / _rank_file(rank))
        if self.worker.is_first:
            fields = {name: getattr(state, name) for name in TrainingState.__dataclass_fields__}
            (directory / STATE_NAME).write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
            for name, content in self.companions.items():
                (directory / name).write_bytes(content)
        mine = [directory / _rank_file(rank), *sorted((directory / DCP_DIRECTORY).glob(f"__{rank}_*"))]
        if self.worker.is_first:
            mine += [directory / DCP_DIRECTORY / ".metadata", directory / STATE_NAME]
            mine += [directory / name for name in self.companions]
        entries = [
            FileEntry(path=path.relative_to(directory).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))
            for path in mine
        ]
        if not self.store.is_local:
            self.store.publish(directory, key.prefix)
        write_vote(self.store, key, rank=rank, files=entries)

    def resume(self, reporter: Reporter, *, identity: Mapping[str, Any]) -> Resumed | None:
        """Load the newest commit that loads; None where there is no commit at all.

        Raises:
            CheckpointError: commits exist but none loads, or the run was started with other parameters.
        """
        found = _from_first(self.worker, lambda: find_resumable(self.store))
        rejected = list(found.rejected)
        for candidate in found.commits:
            try:
                directory, state = self._fetch(candidate)
                # Before it is loaded: with other parameters there may be other tensors, or other extras.
                is_same = state.identity == identity
                if is_same:
                    self._load(candidate, directory, state)
            except CheckpointError as error:
                rejected.append(error.message)
                continue
            for reason in rejected:
                reporter.note(f"checkpoint not usable, an older one is taken: {reason}")
            if not is_same:
                raise _other_identity(state.identity, identity, where=candidate.key.prefix)
            return Resumed(state=state, commit=candidate)
        if rejected:
            raise CheckpointError(
                f"{self.store.url}: checkpoints exist but none can be loaded:\n  " + "\n  ".join(rejected),
                hint="training does not silently start over; restore the files, or delete the checkpoints to start "
                "from step 0",
            )
        if found.num_uncommitted:
            reporter.note(f"{found.num_uncommitted} checkpoints were never committed and are ignored")
        return None

    def _fetch(self, found: CheckpointCommit) -> tuple[Path, TrainingState]:
        return _together(self.worker, lambda: self._read(found), doing=f"read {found.key.prefix}")

    def _load(self, found: CheckpointCommit, directory: Path, state: TrainingState) -> None:
        loaded = self._held()
        _together(
            self.worker,
            lambda: dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(directory / DCP_DIRECTORY))),
            doing=f"load {found.key.prefix}",
        )
        for name, kept in tied_names(self.model).items():
            if kept in loaded["model"]:
                loaded["model"][name] = loaded["model"][kept]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=self._options,
        )
        for name, extra in self.extras.items():
            extra.load_state_dict(loaded["extras"][name])
        if found.world_size == self.worker.world_size:
            _set_rng_state(self.worker, torch.load(directory / _rank_file(self.worker.rank), weights_only=True))
        else:
            seed_rank(self.worker, seed=state.seed, step=state.step)

    def _read(self, found: CheckpointCommit) -> tuple[Path, TrainingState]:
        """Fetch the files, check this rank's share of them against the commit, and read the state."""
        directory = self.store.local_path(found.key.prefix)
        for entry in found.files[self.worker.rank :: self.worker.world_size]:
            if sha256_of(directory / entry.path) != entry.sha256:
                raise CheckpointError(
                    f"{found.key.prefix}/{entry.path} was altered: its sha256 is not the committed one"
                )
        return directory, TrainingState(**json.loads((directory / STATE_NAME).read_text()))


def start_generation(store: Store, worker: WorkerContext) -> int:
    """Number of this start of training, agreed by all ranks."""
    return _from_first(worker, lambda: claim_generation(store))


def seed_rank(worker: WorkerContext, *, seed: int, step: int) -> None:
    """Seed this rank's RNG as a function of (seed, step, rank)."""
    torch.manual_seed(_seed_of(worker, seed=seed, step=step))


def has_drawn(worker: WorkerContext, *, seed: int) -> bool:
    """True where this rank has drawn random numbers since it was seeded for step 0, as dropout does."""
    current = torch.cuda.get_rng_state(worker.torch_device) if worker.device == "cuda" else torch.get_rng_state()
    fresh = torch.Generator(worker.torch_device).manual_seed(_seed_of(worker, seed=seed, step=0))
    return not torch.equal(current, fresh.get_state())


def _seed_of(worker: WorkerContext, *, seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) * 65_537 + worker.rank


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _staging_directory(store: Store, key: AttemptKey) -> Path:
    """Where this rank writes: the place itself on a local store, which all ranks share."""
    if not store.is_local:
        return Path(tempfile.mkdtemp(prefix="pipeline-checkpoint-"))
    directory = store.local_path(key.prefix)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _rng_state(worker: WorkerContext) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if worker.device == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(worker.torch_device)
    return state


def _set_rng_state(worker: WorkerContext, state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if worker.device == "cuda":
        torch.cuda.set_rng_state(state["cuda"], worker.torch_device)


def _other_identity(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, where: str) -> CheckpointError:
    different = [
        f"{name}: {saved.get(name)!r} then, {wanted.get(name)!r} now"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    return CheckpointError(
        f"{where} was written by a run with other parameters: " + "; ".join(different),
        hint="a schedule is not continued with another horizon; use another workspace to start anew",
    )


def _together(worker: WorkerContext, act: Callable[[], ValueT], *, doing: str) -> ValueT:
    """Do `act` on every rank and agree: where one rank fails, all raise and name it."""
    problem: dict[int, str] = {}
    value: ValueT | None = None
    try:
        value = act()
    except CheckpointException as error:  # of DCP: the same on every rank, and no Exception but a BaseException
        problem = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    except Exception as error:  # every rank must learn of it, whatever it is, or the others wait for ever
        problem = {worker.rank: f"{type(error).__name__}: {error}"}
    problems: list[dict[int, str]] = [{}] * worker.world_size
    dist.all_gather_object(problems, problem)
    by_rank = {rank: text for found in problems for rank, text in found.items()}
    failed = [f"rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
    if failed:
        raise CheckpointError(f"cannot {doing}: " + "; ".join(failed))
    return value  # type: ignore[return-value]


def _from_first(worker: WorkerContext, make: Callable[[], ValueT]) -> ValueT:
    """What rank 0 made, on every rank; where rank 0 raised a `PipelineError`, all raise it."""
    box: list[Any] = [None]
    if worker.is_first:
        try:
            box = [make()]
        except PipelineError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], PipelineError):
        raise box[0]
    return box[0]
