"""The micro-batcher as asyncio sees it.

Owns the bridge from the batcher's thread to one event loop. The one decision: a coroutine that is cancelled takes its
request out of the queue.
"""

import asyncio

from pipeline.serving.engine.batch_request import BatchAnswer, BatchRequest
from pipeline.serving.engine.micro_batcher import MicroBatcher


async def ask(batcher: MicroBatcher, request: BatchRequest) -> BatchAnswer:
    """The answer to a request; cancelling it cancels the request.

    Raises:
        EngineUnavailable: the batcher takes no request now.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[BatchAnswer] = loop.create_future()

    def deliver(answer: BatchAnswer) -> None:
        if not answered.done():
            answered.set_result(answer)

    def sink(answer: BatchAnswer) -> None:
        loop.call_soon_threadsafe(deliver, answer)

    batcher.submit(request, sink=sink)
    try:
        return await answered
    finally:
        if not answered.done() or answered.cancelled():
            batcher.cancel(request.request_id)
