"""The ranks of one side of `pipeline bench train`: fresh processes that train when they are asked.

Owns the processes of a side and the questions between them and the bench. Knows no side's loop. The one decision: a
side has processes of its own, so that neither what it sets in its process nor what it imports meets another side; while
one side trains, the others wait in a pipe and take no time of a core.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from pipeline.errors import StageError
from pipeline.training.launch.spawn import spawn
from pipeline.training.session import TrainJob
from pipeline.training.worker import WorkerContext

ANSWER_SECONDS = 300.0
LIFE_SECONDS = 3600.0
END_SECONDS = 10.0
"""Ranks that have not ended so long after they were asked to are killed."""
_POLL_SECONDS = 0.5


class Loop(Protocol):
    """One rank's training loop of a side, inside its process group."""

    def advance(self, steps: int) -> dict[int, float]:
        """Take optimizer steps; the mean loss of steps that the side looks at (from 1), at the latest the last one's.

        Every side reports alike: the loss over all ranks, each `log_every_steps` and at the first step.
        """
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...


class Gang:
    """Ranks that answer; `with` ends them."""

    def __init__(self, name: str, loop: str, *, job: TrainJob, world_size: int) -> None:
        """Start the processes.

        Args:
            name: of the side, in errors.
            loop: `module:function`, called in each rank with `(worker, job)` for the context manager of its `Loop`.
            job: what all sides train.
            world_size: ranks.
        """
        self._name = name
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._ours = [mine for mine, _ in pipes]
        self._theirs = [theirs for _, theirs in pipes]
        self._pids: list[int] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"bench-{name}")
        self._ranks: Future[list[Any]] = self._thread.submit(
            spawn, _serve, self._theirs, loop, job, world_size=world_size, timeout_seconds=LIFE_SECONDS
        )

    def ask(self, question: str, *arguments: Any, timeout_seconds: float = ANSWER_SECONDS) -> tuple[float, Any]:
        """Call that method of every rank's loop between two barriers.

        Returns:
            Seconds between the barriers, and what rank 0's method returned.

        Raises:
            PipelineError: a rank raised it, ended, or did not answer in time.
        """
        for pipe in self._ours:
            pipe.send((question, arguments))
        deadline = time.monotonic() + timeout_seconds
        answers = [self._answer(pipe, deadline) for pipe in self._ours]
        return answers[0]

    def _answer(self, pipe: Connection, deadline: float) -> tuple[float, Any]:
        answer: tuple[float, Any] | None = None
        while answer is None:
            if wait([pipe], timeout=_POLL_SECONDS):
                answer = self._heard(pipe)
            elif self._ranks.done():
                self._ranks.result()
                raise StageError(f"{self._name}: its ranks ended early")
            elif time.monotonic() > deadline:
                raise StageError(f"{self._name} did not answer in time")
        return answer

    def _heard(self, pipe: Connection) -> tuple[float, Any] | None:
        """The next answer of a rank; None where it says which process it is, as each does first."""
        said: int | tuple[float, Any] = pipe.recv()
        if isinstance(said, int):
            self._pids.append(said)
            return None
        return said

    def __enter__(self) -> "Gang":
        """Nothing more to do."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """End the ranks, those that hang by force; what they raised was raised by `ask`."""
        for pipe in self._ours:
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    self._heard(pipe)
        for pipe in (*self._ours, *self._theirs):
            pipe.close()
        try:
            self._ranks.exception(timeout=END_SECONDS)
        except TimeoutError:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._ranks.exception()
        self._thread.shutdown()


def _serve(worker: WorkerContext, pipes: Sequence[Connection], loop: str, job: TrainJob) -> None:
    """A rank: answers until its pipe ends."""
    module, _, name = loop.partition(":")
    enter: Callable[..., Any] = getattr(importlib.import_module(module), name)
    pipe = pipes[worker.rank]
    pipe.send(os.getpid())
    with enter(worker, job) as entered:
        while True:
            try:
                question, arguments = pipe.recv()
            except EOFError:
                return
            entered.barrier()
            started = time.perf_counter()
            value = getattr(entered, question)(*arguments)
            entered.barrier()
            pipe.send((time.perf_counter() - started, value))
