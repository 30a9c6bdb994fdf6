"""Ranks as plain processes of this machine.

Owns starting, watching and ending them, and starting them again. Knows nothing of Ray. The one decision: a rank hands
back a value or an exception through a pipe; when one rank fails, its error is raised and the others are ended at once,
because they would otherwise wait in a collective until it times out.

CPU ranks are forked from a server process that has imported torch and training once: measured on two busy cores, 12.4 s
to the first gang, 0.14 s to the next. A process that may have asked the CUDA driver anything cannot be forked, so ranks
of CUDA are fresh processes.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import psutil

from pipeline.artifacts.store import Store
from pipeline.errors import (
    EXIT_CODE_BY_CLASS,
    ClusterError,
    FailureClass,
    PipelineError,
    PreemptedError,
    StoreError,
)
from pipeline.training.failure import RankFailure, as_pipeline_error, first_failure, is_consequence
from pipeline.training.faults.last_words import set_channel
from pipeline.training.faults.recovery import Outage, record_outage
from pipeline.training.worker import WorkerContext

_JOIN_SECONDS = 10.0
_CAUSE_SECONDS = 5.0
"""The error of a rank that lost contact waits so long for the error of the rank it lost."""
_STACKS_SECONDS = 1.0
_STACK_SIGNAL = signal.SIGQUIT
"""As of old: a process that gets it says what its threads are doing."""
_STACK_CHARACTERS = 4_000
_PRELOADED = ("pipeline.training.loop", "transformers.models.llama.modeling_llama")
"""transformers imports the second when such a model is made; that took 1.3 s of each rank's start on a busy machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    number: int
    process: BaseProcess
    results: Connection
    stacks: Path
    """Where it writes what its threads are doing, when asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What a rank is given beside its work."""

    worker: WorkerContext
    environment: Mapping[str, str]
    """Of the launching process; that of the server is as old as the server."""
    stacks: str


def spawn(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    timeout_seconds: float,
    device: Literal["cpu", "cuda"] = "cpu",
    num_threads: int = 1,
    on_failure: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Call `function(worker, *arguments)` in `world_size` fresh processes; what each returned, by rank.

    Args:
        function: importable by name; gets a `WorkerContext` whose process group it must join itself.
        *arguments: pickled to every rank.
        world_size: number of processes.
        timeout_seconds: deadline for all of them.
        device: of every rank; CUDA ranks take devices 0, 1, ...
        num_threads: of torch operators in each process.
        on_failure: called when a rank is known to have failed, before the others are ended.

    Raises:
        PipelineError: the one that a rank raised first, with the others' in a line each.
        StageError: a rank raised something else; carries its traceback.
        ClusterError: a rank died, does not answer, or the deadline passed.
    """
    ranks: list[_Rank] = []
    patience_seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="pipeline-ranks-") as directory:
        try:
            address = f"127.0.0.1:{free_port()}"
            for number in range(world_size):
                worker = WorkerContext(
                    rank=number,
                    world_size=world_size,
                    local_rank=number,
                    device=device,
                    device_reason="chosen by the caller of spawn",
                    store_address=address,
                    num_threads=num_threads,
                )
                ranks.append(_start(worker, function, arguments, directory=Path(directory)))
            try:
                values = _collect(ranks, deadline=time.monotonic() + timeout_seconds)
            except PipelineError:
                on_failure()
                raise
            patience_seconds = _JOIN_SECONDS
            return values
        finally:
            _end(ranks, patience_seconds=patience_seconds)


def respawn(
    function: Callable[..., Any], *arguments: Any, store: Store, max_restarts: int, **options: Any
) -> list[Any]:
    """As `spawn`, and again where infrastructure failed, at most `max_restarts` times.

    Leaves in `store`, the workspace of the training, when the old gang was known to have failed and when it was gone.

    Raises:
        PipelineError: as `spawn`; that of the last gang.
        PreemptedError: at once, for the machine is taken away; the caller starts again where there is one.
    """
    noticed_at = 0.0

    def notice() -> None:
        nonlocal noticed_at
        noticed_at = time.time()

    for remaining in range(max_restarts, -1, -1):
        try:
            return spawn(function, *arguments, on_failure=notice, **options)
        except PreemptedError:
            raise
        except PipelineError as error:
            if error.failure_class is not FailureClass.INFRA or not remaining:
                raise
            with contextlib.suppress(StoreError):  # a mark that is missing only leaves a metric out
                record_outage(store, Outage(noticed_at=noticed_at, torn_down_at=time.time()))
    raise AssertionError("a loop over at least one start returns or raises")


def _start(worker: WorkerContext, function: Callable[..., Any], arguments: Sequence[Any], *, directory: Path) -> _Rank:
    context = _context(worker.device)
    receiver, sender = context.Pipe(duplex=False)
    stacks = directory / f"rank-{worker.rank}.txt"
    start = _Start(worker=worker, environment=dict(os.environ), stacks=str(stacks))
    process = context.Process(target=_enter, args=(sender, function, start, arguments), daemon=True)
    process.start()
    sender.close()
    return _Rank(number=worker.rank, process=process, results=receiver, stacks=stacks)


def _context(device: Literal["cpu", "cuda"]) -> ForkServerContext | SpawnContext:
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _enter(sender: Connection, function: Callable[..., Any], start: _Start, arguments: Sequence[Any]) -> None:
    """The process boundary of a rank: whatever it raises becomes a value of the pipe."""
    worker = start.worker
    os.environ.clear()
    os.environ.update(start.environment, OMP_NUM_THREADS=str(worker.num_threads))

    def send(kind: str, value: Any) -> None:
        sender.send_bytes(pickle.dumps((kind, value, time.time())))

    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    set_channel(lambda error: send("error", error))
    with Path(start.stacks).open("w") as stacks:
        faulthandler.register(_STACK_SIGNAL, file=stacks)
        try:
            try:
                value = function(worker, *arguments)
            except Exception as error:
                send("error", as_pipeline_error(error, rank=worker.rank))
            else:
                send("value", value)
        finally:
            faulthandler.unregister(_STACK_SIGNAL)
            sender.close()


def _end_with_parent() -> None:
    """Nobody reads what a rank sends, or ends it, once the process that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(EXIT_CODE_BY_CLASS[FailureClass.INFRA])


def _collect(ranks: Sequence[_Rank], *, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    failures: list[RankFailure] = []
    pending = {rank.results: rank for rank in ranks}
    while pending:
        # Once a rank has failed for a reason of its own, only what is already there is read.
        has_cause = any(not is_consequence(failure.error) for failure in failures)
        ready = wait(list(pending), timeout=0.0 if has_cause else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[call-overload]
            kind, value, at = _outcome(rank)
            if kind == "value":
                values[rank.number] = value
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + _CAUSE_SECONDS)
            failures.append(RankFailure(rank=rank.number, error=value, at=at))
    silent = list(pending.values())
    if silent and all(is_consequence(failure.error) for failure in failures):
        problem = "no result before the deadline" if not failures else "does not answer"
        told = "\n".join(f"rank {rank.number}: {problem}; {_what_it_does(rank)}" for rank in silent)
        failures.append(RankFailure(rank=silent[0].number, error=ClusterError(told), at=time.time()))
    if failures:
        raise first_failure(failures)
    return [values[rank.number] for rank in ranks]


def _outcome(rank: _Rank) -> tuple[str, Any, float]:
    """What a rank sent, or how it died."""
    try:
        kind, value, at = pickle.loads(rank.results.recv_bytes())
    except EOFError:
        rank.process.join(_JOIN_SECONDS)
        died = f"rank {rank.number} died with exit code {rank.process.exitcode}"
        return "error", ClusterError(died, hint="look for the out-of-memory killer, or who sent the signal"), 0.0
    return kind, value, at


def _what_it_does(rank: _Rank) -> str:
    """The state of a rank's process and its stacks, if it can still write them."""
    if rank.process.pid is None or not psutil.pid_exists(rank.process.pid):
        return "its process is gone"
    state = f"its process is {psutil.Process(rank.process.pid).status()}"
    before = rank.stacks.stat().st_size if rank.stacks.exists() else None
    if before is None:
        return state
    os.kill(rank.process.pid, _STACK_SIGNAL)
    until = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < until and rank.stacks.stat().st_size == before:
        time.sleep(0.05)
    stacks = rank.stacks.read_text()[:_STACK_CHARACTERS]
    return f"{state}\n{stacks}" if stacks else state


def _end(ranks: Sequence[_Rank], *, patience_seconds: float) -> None:
    if not patience_seconds:
        for rank in ranks:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(patience_seconds or None)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        with contextlib.suppress(OSError):
            rank.results.close()


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
