"""Copies of requests for a challenger whose answers nobody gets.

Owns the queue of copies, the asking and the comparing. Knows nothing of how a client is answered. The one decision: a
copy is made after the champion's answer began, waits in a bounded queue and is dropped where that is full, so that the
slowest challenger costs the client nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Scope

from pipeline.serving.traffic.traffic_comparison import Comparison, compare
from pipeline.serving.traffic.traffic_exchange import Incoming, Recorded
from pipeline.serving.traffic.traffic_settings import TrafficSettings
from pipeline.serving.traffic.traffic_window import Arm, Window

_LOG = logging.getLogger(__name__)
ANSWER_SECONDS = 120.0
"""For the whole answer of either arm, after which a copy is given up."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A request that the champion answers."""

    scope: Scope
    incoming: Incoming
    champion: Recorded
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the champion's answer has ended, one way or another."""


class Copies:
    """The queue and its workers; lives on one event loop."""

    def __init__(self, settings: TrafficSettings, challenger: ASGIApp, *, window: Window) -> None:
        self._settings = settings
        self._challenger = challenger
        self._window = window
        self._queue: asyncio.Queue[Copy] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def follow(self, copy: Copy) -> Iterator[None]:
        """Queue the copy as soon as the champion's answer begins, inside the block."""
        waiting = self._start(self._queue_when_begun(copy))
        try:
            yield
        finally:
            copy.is_answered.set()
            if not copy.champion.started.is_set():
                waiting.cancel()

    async def close(self) -> None:
        """Give up what waits and what runs."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _queue_when_begun(self, copy: Copy) -> None:
        await copy.champion.started.wait()
        if self._queue is None:
            self._queue = asyncio.Queue(self._settings.queued_copies)
            for _ in range(self._settings.concurrent_copies):
                self._start(self._work(self._queue))
        try:
            self._queue.put_nowait(copy)
        except asyncio.QueueFull:
            self._window.drop()

    async def _work(self, queue: "asyncio.Queue[Copy]") -> None:
        while True:
            await self._ask(await queue.get())

    async def _ask(self, copy: Copy) -> None:
        recorded = Recorded(None, arm=Arm.CHALLENGER, keeps_body=True)
        scope = {**copy.scope, "state": dict(copy.scope.get("state", {}))}
        answering = self._start(_awaited(self._challenger(scope, copy.incoming.detached(), recorded.send)))
        begun = self._start(_awaited(recorded.started.wait()))
        try:
            # Waiting raises nothing: whatever the challenger does, the next copy is asked.
            await asyncio.wait(
                (answering, begun), timeout=self._settings.first_byte_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if begun.done():
                await asyncio.wait((answering,), timeout=ANSWER_SECONDS)
            if not answering.done():
                _LOG.warning("a copy got no whole answer from the challenger in time")
            elif (error := answering.exception()) is not None:
                _LOG.warning("a copy got no answer from the challenger: %s", error)
        finally:
            answering.cancel()
            begun.cancel()
        recorded.count(self._window, is_gone=False)
        self._window.compared(await self._compare(copy, recorded))

    async def _compare(self, copy: Copy, challenger: Recorded) -> Comparison:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await copy.is_answered.wait()
        ours, theirs = _whole(copy.champion), _whole(challenger)
        if ours is None or theirs is None:
            return Comparison()
        path = copy.scope["path"].removeprefix(copy.scope.get("root_path", ""))
        # Off the loop: reading an answer of megabytes would hold up the clients.
        return await asyncio.to_thread(compare, path, asked=copy.incoming.body, champion=ours, challenger=theirs)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _awaited(work: Awaitable[object]) -> None:
    await work


def _whole(recorded: Recorded) -> bytes | None:
    return recorded.body if recorded.is_complete and recorded.status == 200 else None
