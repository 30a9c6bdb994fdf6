"""What two spawned ranks do to show that saves in the background share nothing with training."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from rank_functions import Recorder

from pipeline.artifacts.local_store import LocalStore
from pipeline.errors import CheckpointError, StoreError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.checkpoints.rng import seed_rank
from pipeline.training.loop import advance, initial_state
from pipeline.training.session import TrainJob, open_session
from pipeline.training.worker import WorkerContext, joined


class SlowStore(LocalStore):
    """Takes `seconds` for each file of training's own, and has no space for those of one step on one rank."""

    def __init__(self, url: str, *, rank: int, seconds: float, full_at: int) -> None:
        super().__init__(url)
        self._rank, self._seconds, self._full = rank, seconds, f"step-{full_at:08d}/"

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        time.sleep(self._seconds * self._rank)
        if self._full in key and self._rank == 1 and key.endswith(".distcp"):
            raise StoreError("No space left on device")
        with super().writing(key) as stream:
            yield stream


@dataclass
class Found:
    """What one rank saw."""

    steps_while_saving: int
    error: str
    committed: list[int]
    draws: list[list[float]]
    """Of torch, numpy and Python: before a save, after it was resumed, and by the seed of another world size."""
    notes: list[str]


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.random()), random.random()]


def save_while_training(worker: WorkerContext, job: TrainJob) -> Found:
    """Save on a slow store while the default group reduces; then a save that fails on rank 1; then resume."""
    with joined(worker):
        worker = replace(worker, store_address=None)
        session, reporter = open_session(worker, job), Recorder()
        saver = session.checkpointer
        saver.store = SlowStore(job.workspace, rank=worker.rank, seconds=0.2, full_at=2)
        state, _ = advance(session, reporter, state=initial_state(session, reporter), until=1)

        draw()
        saver.begin(state)
        drawn = draw()
        busy = torch.ones(1)
        steps = 0
        going = torch.ones(1)
        while going:  # collectives of training, for as long as any rank still saves
            dist.all_reduce(busy)
            going = torch.tensor(float(not saver._flight.is_over))
            dist.all_reduce(going, op=dist.ReduceOp.MAX)
            steps += bool(going)
        saver.report(reporter)

        state, _ = advance(session, reporter, state=state, until=2)
        saver.begin(state)
        error = ""
        try:
            saver.drain()
        except CheckpointError as caught:
            error = caught.message
        saver.report(reporter)
        resumed = saver.resume(reporter, identity=session.identity)
        assert resumed is not None
        again = draw()
        seed_rank(worker, seed=0, step=5)
        elsewhere = draw()
        saver.close()
        committed = [item.key.step for item in find_resumable(saver.store).commits]
    return Found(
        steps_while_saving=steps,
        error=error,
        committed=committed,
        draws=[drawn, again, elsewhere],
        notes=reporter.notes,
    )
