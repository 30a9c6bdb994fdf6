"""The engine as asyncio sees it.

Owns the bridge from the engine's thread to one event loop. The one decision: one wake-up of the loop a step, however
many requests the step moved, and one item for a stream, however many of its requests moved or steps went by meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pipeline.serving.engine.engine_group import TextEngine
from pipeline.serving.engine.request import Chunk, Request


class AsyncClient:
    """Streams chunks of requests to coroutines of the running event loop."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Sequence[Chunk]]] = {}

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[Chunk], None]:
        """Chunks of requests that belong together, until each had the one with `finish`; leaving early cancels.

        Raises:
            EngineUnavailable: the engine takes no request now.
        """
        queue: asyncio.Queue[Sequence[Chunk]] = asyncio.Queue()
        running: set[str] = set()
        try:
            for request in requests:
                self._queues[request.request_id] = queue
                running.add(request.request_id)
                self._engine.submit(request, sink=self._deliver)
            while running:
                chunks = list(await queue.get())
                while not queue.empty():  # a reader that is slower than the engine gets several steps at once
                    chunks += queue.get_nowait()
                running -= {chunk.request_id for chunk in chunks if chunk.finish is not None}
                yield chunks
        finally:
            for request in requests:
                self._queues.pop(request.request_id, None)
            for request_id in running:
                self._engine.cancel(request_id)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, chunks)

    def _dispatch(self, chunks: Sequence[Chunk]) -> None:
        together: dict[asyncio.Queue[Sequence[Chunk]], list[Chunk]] = {}
        for chunk in chunks:
            queue = self._queues.get(chunk.request_id)
            if queue is not None:
                together.setdefault(queue, []).append(chunk)
        for queue, theirs in together.items():
            queue.put_nowait(theirs)
