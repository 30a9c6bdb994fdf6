"""The engine as asyncio sees it.

Owns the bridge from the engine's thread to one event loop. The one decision: one wake-up of the loop a step, however
many requests the step moved.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pipeline.serving.engine import Engine
from pipeline.serving.request import Chunk, Request


class AsyncClient:
    """Streams chunks of requests to coroutines of the running event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Chunk]] = {}

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Chunks until the one with `finish`; leaving early cancels the request.

        Raises:
            EngineUnavailable: the engine takes no request now.
        """
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        self._queues[request.request_id] = queue
        is_finished = False
        try:
            self._engine.submit(request, sink=self._deliver)
            while not is_finished:
                chunk = await queue.get()
                is_finished = chunk.finish is not None
                yield chunk
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                self._engine.cancel(request.request_id)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, chunks)

    def _dispatch(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            queue = self._queues.get(chunk.request_id)
            if queue is not None:
                queue.put_nowait(chunk)
