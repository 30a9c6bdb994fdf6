"""Saving and loading the state of a training run.

Owns what a checkpoint holds (model, optimizer, RNG of each rank, position, the model's description), and the one save
that may be on its way while training goes on. The one decision: torch.distributed.checkpoint writes the bytes, and the
commit protocol of `checkpoints/commit.py` alone says whether they count; DCP's own metadata file is no commit mark.

The DCP state dict is `{"model": ..., "optimizer": ..., "extras": {<name>: ...}}`, so model tensors are keys
`model.<name in torch>`.
"""

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from pipeline.artifacts.manifest import sha256_of
from pipeline.artifacts.store import Store
from pipeline.errors import CheckpointError, PipelineError
from pipeline.training.checkpoints.commit import (
    AttemptKey,
    CheckpointCommit,
    abandon,
    claim_generation,
    commit,
    find_resumable,
    retain,
    write_vote,
)
from pipeline.training.checkpoints.consensus import TIMEOUT_SECONDS, Consensus, trouble_of
from pipeline.training.checkpoints.flight import Flight, Written
from pipeline.training.checkpoints.history import SaveHistory
from pipeline.training.checkpoints.interval import SaveInterval
from pipeline.training.checkpoints.rng import restore_rng, rng_state
from pipeline.training.checkpoints.shard_writer import AttemptFiles
from pipeline.training.checkpoints.snapshot import Snapshots
from pipeline.training.faults import failpoints
from pipeline.training.parallel.tied_parameters import tied_names
from pipeline.training.reporter import Reporter
from pipeline.training.worker import WorkerContext

DCP_DIRECTORY = "dcp"
STATE_NAME = "state.json"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
STATE_SCHEMA = 2
DRAIN_SECONDS = 60.0
"""A training that ends with an error waits so long for the save on its way."""


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
    """`Session.identity` of the run that wrote it."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """All that a save needs; nothing of it changes any more."""

    state: TrainingState
    held: Mapping[str, Any]
    rng: bytes


@dataclass(kw_only=True)
class Checkpointer:
    """Saves and resumes for one start of training.

    It is made, and `begin`, `save`, `drain`, `resume` and `close` are called, by all ranks together and from the thread
    that trains.
    """

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
    in_background: bool = True
    """Training goes on once the state is copied; False to wait for the commit."""
    interval: SaveInterval | None = None
    """Where saves are due by the clock."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """A rank waits so long for another one's bytes to be written."""
    before_commit: Callable[[], None] = lambda: None
    """Called by each rank when it votes, for what must have left the process once the commit is there."""
    must_resume: bool = False
    """True where commits were seen, so the model has been left as it was made, and only a checkpoint fills it."""
    consensus: Consensus = field(init=False)
    history: SaveHistory = field(init=False)
    _snapshots: Snapshots = field(default_factory=Snapshots, init=False)
    _flight: Flight | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.consensus = Consensus.open(self.worker, timeout_seconds=self.timeout_seconds)
        self.history = SaveHistory(interval=self.interval)

    def begin(self, state: TrainingState) -> None:
        """Copy the state and let it be written in the background; waits for the save before it.

        Raises:
            CheckpointError: the save before it failed, and no more may; names the ranks. Earlier commits are untouched.
        """
        started = time.monotonic()
        self._land()
        self.history.check()
        taken = self._take(state)
        self._flight = Flight(
            lambda: self._write(taken), step=state.step, started=started, in_background=self.in_background
        )
        self.history.begin(at=started)

    def save(self, state: TrainingState) -> CheckpointCommit:
        """Write and commit a checkpoint; blocks until it is durable on every rank.

        Raises:
            CheckpointError: a rank could not write; names the rank. Earlier commits are untouched.
        """
        self.begin(state)
        made = self.drain()
        assert made is not None
        return made

    def drain(self) -> CheckpointCommit | None:
        """Wait for the save on its way; the newest commit.

        Raises:
            CheckpointError: the last save failed.
        """
        self._land()
        last = self.history.last
        if last is not None and last.error is not None:
            raise last.error
        return self.history.newest

    def close(self) -> None:
        """Wait for the save on its way, but not for ever, and give up the group; never raises for a save."""
        if self._flight is None or self._flight.wait(DRAIN_SECONDS):
            self.consensus.close()

    def is_due(self) -> bool:
        """True where the clock says that the next save should begin; asked of rank 0 alone."""
        self._land_if_over()
        return self.history.is_due(now=time.monotonic(), is_flying=self._flight is not None)

    def report(self, reporter: Reporter) -> None:
        """Tell of saves that have ended."""
        self._land_if_over()
        self.history.report(reporter)

    def _land_if_over(self) -> None:
        if self._flight is not None and self._flight.is_over:
            self._land()

    def _land(self) -> None:
        if self._flight is not None:
            landing = self._flight.land()  # before it is forgotten: an interrupt may come while it is waited for
            self._flight = None
            self.history.end(landing)

    def _take(self, state: TrainingState) -> _Taken:
        rng = io.BytesIO()
        torch.save(rng_state(self.worker), rng)
        return _Taken(state=state, held=self._snapshots.take(self._held()), rng=rng.getvalue())

    def _write(self, taken: _Taken) -> Written:
        """Write, vote and commit; in the background, on the group of its own."""
        together, is_first = self.consensus.together, self.worker.is_first
        started, step = time.monotonic(), taken.state.step
        key = self.consensus.from_first(lambda: AttemptKey.new(step=step, generation=self.generation))
        files = AttemptFiles(self.store, prefix=key.prefix)
        try:
            together(
                lambda: dcp.save(
                    dict(taken.held),
                    storage_writer=files.dcp_writer(DCP_DIRECTORY),
                    process_group=self.consensus.group,
                ),
                doing=f"write step {step}",
            )
            written = time.monotonic()
            failpoints.reach(failpoints.Place.SAVE_VOTE, step=step)
            together(lambda: self._vote(key, files, taken), doing=f"vote for step {step}")
            failpoints.reach(failpoints.Place.SAVE_COMMIT, step=step)
            made: CheckpointCommit = self.consensus.from_first(
                lambda: commit(self.store, key, world_size=self.worker.world_size)
            )
        except PipelineError as error:
            # All ranks are past their writing, so what there is of the attempt takes space for nothing.
            if is_first and (trouble := trouble_of(lambda: abandon(self.store, key))):
                raise CheckpointError(f"{error.message}; {trouble}", hint=error.hint) from error
            raise
        trouble = ""
        if is_first:
            trouble = trouble_of(lambda: retain(self.store, keep=self.keep, generation=self.generation, made=made.key))
        return Written(
            commit=made,
            write_seconds=written - started,
            commit_seconds=time.monotonic() - written,
            trouble=trouble,
        )

    def _held(self) -> dict[str, dict[str, Any]]:
        """The DCP state dict; a tied tensor is held once, under its first name."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer, options=self._options)
        for name in tied_names(self.model):
            model_state.pop(name, None)
        # Rates, decays and the like are the config's, which is identity; and each stage of a pipeline has other groups.
        held = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
        if self.extras:
            held["extras"] = {name: extra.state_dict() for name, extra in self.extras.items()}
        return held

    def _groups(self) -> Any:
        """The optimizer's groups as they are."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=self._options)["param_groups"]

    @property
    def _options(self) -> StateDictOptions:
        return StateDictOptions(ignore_frozen_params=self.trained_only, strict=not self.trained_only)

    def _vote(self, key: AttemptKey, files: AttemptFiles, taken: _Taken) -> None:
        files.put(_rank_file(self.worker.rank), taken.rng)
        if self.worker.is_first:
            fields = {name: getattr(taken.state, name) for name in TrainingState.__dataclass_fields__}
            files.put(STATE_NAME, (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode())
            for name, content in self.companions.items():
                files.put(name, content)
        self.before_commit()
        write_vote(self.store, key, rank=self.worker.rank, files=files.entries)

    def resume(self, reporter: Reporter, *, identity: Mapping[str, Any]) -> Resumed | None:
        """Load the newest commit that loads; None where there is no commit at all.

        Raises:
            CheckpointError: commits exist but none loads, or the run was started with other parameters.
        """
        self._land()
        found = self.consensus.from_first(lambda: find_resumable(self.store))
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
            self.history.newest = candidate
            return Resumed(state=state, commit=candidate)
        if rejected:
            raise CheckpointError(
                f"{self.store.url}: checkpoints exist but none can be loaded:\n  " + "\n  ".join(rejected),
                hint="training does not silently start over; restore the files, or delete the checkpoints to start "
                "from step 0",
            )
        if self.must_resume:
            raise CheckpointError(
                f"{self.store.url}: the checkpoints that were there when training was set up are gone",
                hint="look who deletes them, and start again",
            )
        if found.num_uncommitted:
            reporter.note(f"{found.num_uncommitted} checkpoints were never committed and are ignored")
        return None

    def _fetch(self, found: CheckpointCommit) -> tuple[Path, TrainingState]:
        return self.consensus.together(lambda: self._read(found), doing=f"read {found.key.prefix}")

    def _load(self, found: CheckpointCommit, directory: Path, state: TrainingState) -> None:
        loaded = self._held()
        worker = self.worker
        self.consensus.together(
            lambda: dcp.load(
                loaded,
                storage_reader=dcp.FileSystemReader(str(directory / DCP_DIRECTORY)),
                process_group=self.consensus.group,
            ),
            doing=f"load {found.key.prefix}",
        )
        for name, kept in tied_names(self.model).items():
            if kept in loaded["model"]:
                loaded["model"][name] = loaded["model"][kept]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict={**loaded["optimizer"], "param_groups": self._groups()},
            options=self._options,
        )
        for name, extra in self.extras.items():
            extra.load_state_dict(loaded["extras"][name])
        own = directory / _rank_file(worker.rank) if found.world_size == worker.world_size else None
        draw_on = partial(restore_rng, worker, own, seed=state.seed, step=state.step)
        self.consensus.together(draw_on, doing="restore random numbers")
        if worker.local_rank == 0:  # every rank has read it
            self.store.forget_local(found.key.prefix)

    def _read(self, found: CheckpointCommit) -> tuple[Path, TrainingState]:
        """Fetch the files, check this rank's share of them against the commit, and read the state."""
        worker = self.worker
        directory = self.store.local_path(found.key.prefix, names=[entry.path for entry in found.files])
        share = found.files[worker.rank :: worker.world_size]
        if not self.store.is_local:  # each host has a copy of its own
            share = found.files if worker.local_rank == 0 else ()
        for entry in share:
            if sha256_of(directory / entry.path) != entry.sha256:
                self.store.forget_local(found.key.prefix)
                raise CheckpointError(
                    f"{found.key.prefix}/{entry.path} was altered: its sha256 is not the committed one"
                )
        return directory, TrainingState(**json.loads((directory / STATE_NAME).read_text()))


def start_generation(store: Store, worker: WorkerContext) -> int:
    """Number of this start of training, agreed by all ranks.

    Raises:
        StoreError: the store cannot be written, or creates an object twice.
    """

    def claim() -> int:
        store.check_writable()
        return claim_generation(store)

    return Consensus(worker=worker).from_first(claim)


def has_commits(store: Store, worker: WorkerContext) -> bool:
    """True where training goes on from a checkpoint, or fails because none of them can be read."""
    return Consensus(worker=worker).from_first(lambda: bool(find_resumable(store).commits))


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


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
