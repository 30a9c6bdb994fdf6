"""Ranks as plain processes of this machine.

Owns starting, watching and ending them. Knows nothing of Ray. The one decision: a rank hands back a value or an
exception through a pipe; when one rank fails, its error is raised and the others are ended at once, because they would
otherwise wait in a collective until it times out.
"""

import multiprocessing
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from pipeline.errors import ClusterError
from pipeline.training.failure import LostContactError, as_pipeline_error
from pipeline.training.worker import WorkerContext

_JOIN_SECONDS = 10.0
_CAUSE_SECONDS = 10.0
"""A rank that lost contact waits so long for the error of the rank it lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    number: int
    process: BaseProcess
    results: Connection


def spawn(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    timeout_seconds: float,
    device: Literal["cpu", "cuda"] = "cpu",
    num_threads: int = 1,
) -> list[Any]:
    """Call `function(worker, *arguments)` in `world_size` fresh processes; what each returned, by rank.

    Args:
        function: importable by name; gets a `WorkerContext` whose process group it must join itself.
        *arguments: pickled to every rank.
        world_size: number of processes.
        timeout_seconds: deadline for all of them.
        device: of every rank; CUDA ranks take devices 0, 1, ...
        num_threads: of torch operators in each process.

    Raises:
        PipelineError: the one a rank raised, as it is.
        StageError: a rank raised something else; carries its traceback.
        ClusterError: a rank died or the deadline passed.
    """
    context = multiprocessing.get_context("spawn")
    address = f"127.0.0.1:{free_port()}"
    ranks: list[_Rank] = []
    patience_seconds = 0.0
    try:
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
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(sender, function, worker, arguments), daemon=True)
            process.start()
            sender.close()
            ranks.append(_Rank(number=number, process=process, results=receiver))
        values = _collect(ranks, deadline=time.monotonic() + timeout_seconds)
        patience_seconds = _JOIN_SECONDS
        return values
    finally:
        _end(ranks, patience_seconds=patience_seconds)


def _enter(sender: Connection, function: Callable[..., Any], worker: WorkerContext, arguments: Sequence[Any]) -> None:
    """The process boundary of a rank: whatever it raises becomes a value of the pipe."""
    os.environ["OMP_NUM_THREADS"] = str(worker.num_threads)
    outcome: tuple[str, Any]
    try:
        outcome = ("value", function(worker, *arguments))
    except Exception as error:
        outcome = ("error", as_pipeline_error(error, rank=worker.rank))
    try:
        sender.send_bytes(pickle.dumps(outcome))
    finally:
        sender.close()


def _collect(ranks: Sequence[_Rank], *, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    lost: LostContactError | None = None
    pending = {rank.results: rank for rank in ranks}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and lost is not None:
            break
        if not ready:
            waiting = ", ".join(str(rank.number) for rank in pending.values())
            raise ClusterError(f"rank {waiting}: no result before the deadline")
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[call-overload]
            try:
                kind, value = pickle.loads(rank.results.recv_bytes())
            except EOFError:
                rank.process.join(_JOIN_SECONDS)
                raise ClusterError(f"rank {rank.number} died with exit code {rank.process.exitcode}") from None
            if kind == "value":
                values[rank.number] = value
            elif isinstance(value, LostContactError):
                lost = value
                deadline = min(deadline, time.monotonic() + _CAUSE_SECONDS)
            else:
                raise value
    if lost is not None:
        raise lost
    return [values[rank.number] for rank in ranks]


def _end(ranks: Sequence[_Rank], *, patience_seconds: float) -> None:
    for rank in ranks:
        rank.process.join(patience_seconds)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.results.close()


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
