"""Our side of `pipeline bench train`: the loop of `pipeline.training`, as a stage runs it.

Owns how the bench calls it. The one decision: steps are those of `advance`, with its reports and checks, so nothing
that a stage pays for is left out but checkpoints and validations, which have rows or a share of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from pipeline.stages.reporting import BufferedReporter
from pipeline.training.loop import advance, initial_state
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.worker import WorkerContext, joined


class OurLoop:
    """See `pipeline.diagnostics.bench_train_gang.Loop`."""

    def __init__(self, session: Session) -> None:
        """Measure the initial weights, as every start does."""
        self._session = session
        self._reporter = BufferedReporter()
        self._state = initial_state(session, self._reporter)
        self._taken = 0

    def advance(self, steps: int) -> dict[int, float]:
        """Take optimizer steps."""
        self._reporter.drain()
        until = self._taken + steps
        self._state, _ = advance(
            self._session, self._reporter, state=replace(self._state, step=self._taken), until=until
        )
        self._taken = until
        return {
            report.step: report.payload["loss"]
            for report in self._reporter.drain()
            if report.kind == "metrics" and report.step is not None and "loss" in report.payload
        }

    def save(self) -> None:
        """Write and commit a checkpoint, and wait for it."""
        self._session.checkpointer.save(replace(self._state, step=self._taken))

    def begin_save(self) -> None:
        """Begin a checkpoint as training does: from here to its return is the stall."""
        self._session.checkpointer.begin(replace(self._state, step=self._taken))

    def advance_and_drain(self, steps: int) -> None:
        """Take optimizer steps and wait for the save on its way."""
        self.advance(steps)
        self._session.checkpointer.drain()

    def save_plainly(self, directory: str) -> None:
        """What a loop without ours does: the same state through DCP, waiting for it; no hashes, votes or commit."""
        model, optimizer = get_state_dict(self._session.model, self._session.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


@contextmanager
def enter(worker: WorkerContext, job: TrainJob) -> Iterator[OurLoop]:
    """The loop of one rank."""
    with joined(worker):
        yield OurLoop(open_session(worker, job))
