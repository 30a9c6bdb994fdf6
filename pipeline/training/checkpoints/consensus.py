"""How ranks agree while they save and resume.

Owns doing one thing on all ranks and learning of each one's failure, and taking one value from rank 0. Knows nothing of
checkpoints. The one decision: these collectives have a gloo group of their own, with its own deadline, because a save
goes on in a thread while training uses the default group, and one group must not be used by two threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.errors import CheckpointError, PipelineError
from pipeline.training.worker import WorkerContext

TIMEOUT_SECONDS = 1800.0
"""A rank waits so long for another one's bytes to be written; far above a collective's, for storage may be slow."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Consensus:
    """One rank's side; every method is called by all ranks together, by one thread at a time."""

    worker: WorkerContext
    group: Any = None
    """A gloo group of all ranks; the default group where it is None, for what is agreed before training starts."""

    @classmethod
    def open(cls, worker: WorkerContext, *, timeout_seconds: float) -> "Consensus":
        """Make the group; called by all ranks inside the process group."""
        return cls(worker=worker, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)))

    def close(self) -> None:
        """Give the group up."""
        dist.destroy_process_group(self.group)

    def together(self, act: Callable[[], ValueT], *, doing: str) -> ValueT:
        """Do `act` on every rank and agree.

        Raises:
            CheckpointError: a rank failed; all ranks raise it, and it names every rank that did.
        """
        problem: dict[int, str] = {}
        value: ValueT | None = None
        try:
            value = act()
        except CheckpointException as error:  # of DCP: the same on every rank, and no Exception but a BaseException
            problem = {rank: _in_words(cause) for rank, (cause, _) in error.failures.items()}
        except Exception as error:  # every rank must learn of it, whatever it is, or the others wait for ever
            problem = {self.worker.rank: _in_words(error)}
        problems: list[dict[int, str]] = [{}] * self.worker.world_size
        dist.all_gather_object(problems, problem, group=self.group)
        by_rank = {rank: text for found in problems for rank, text in found.items()}
        if by_rank:
            failed = [f"rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
            raise CheckpointError(f"cannot {doing}: " + "; ".join(failed))
        return value  # type: ignore[return-value]

    def from_first(self, make: Callable[[], ValueT]) -> ValueT:
        """What rank 0 made, on every rank.

        Raises:
            PipelineError: what rank 0 raised; any other exception of its as a `CheckpointError`.
        """
        box: list[Any] = [None]
        if self.worker.is_first:
            try:
                box = [make()]
            except PipelineError as error:
                box = [error]
            except Exception as error:  # the others wait for the value
                box = [CheckpointError(f"rank 0: {_in_words(error)}")]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], PipelineError):
            raise box[0]
        return box[0]


def trouble_of(act: Callable[[], None]) -> str:
    """What went wrong with what rank 0 does alone, in words; empty where it is done. Nothing is raised.

    The others do not know of it, so an error would end one rank and leave them waiting.
    """
    try:
        act()
    except Exception as error:  # whatever a store's driver comes up with
        return _in_words(error)
    return ""


def _in_words(error: BaseException) -> str:
    return error.message if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
