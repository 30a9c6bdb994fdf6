"""The choices of one body, running together, and their way to the client.

Owns their life: they start together, end together, and what goes wrong with one ends the body. Knows nothing of the
shapes of an endpoint. The one decision: the first chunk is awaited before the status is sent, so whatever goes wrong
before it is a status and not an event in a stream; and what one engine step brought is one write.
"""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pipeline.serving.engine import request as engine_request
from pipeline.serving.engine.async_client import AsyncClient
from pipeline.serving.engine.engine_group import TextEngine
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.request import Chunk, FinishReason, Sampling
from pipeline.serving.http.http_routes import unavailable
from pipeline.serving.http.rate_limits import Admission
from pipeline.serving.json_body import Rejected

Step = list[tuple[int, Chunk]]
"""(choice, chunk) of one engine step."""
DONE = b"data: [DONE]\n\n"


class RunningChoices:
    """The choices of one body."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        samplings: Sequence[Sampling],
        admission: Admission,
        envelope: dict[str, Any],
    ) -> None:
        """Make requests of the choices.

        Args:
            client: of the engine.
            request_id: what the choices' ids begin with.
            prompts: tokens of each choice.
            samplings: of each choice.
            admission: settled when they have ended.
            envelope: of the answer; learns which version computes it, which is known when a choice gets its slot.
        """
        self.num_generated = 0
        self._envelope = envelope
        self._client = client
        self._admission = admission
        self._requests = [
            engine_request.Request(request_id=f"{request_id}-{index}", prompt=prompt, sampling=sampling)
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]

    async def steps(self) -> AsyncGenerator[Step, None]:
        """What each engine step brought; leaving early cancels every choice.

        Raises:
            Rejected: the engine is not available, or a choice failed.
        """
        index_of = {request.request_id: index for index, request in enumerate(self._requests)}
        num_prompt = sum(len(request.prompt) for request in self._requests)
        try:
            async with contextlib.aclosing(self._client.stream(self._requests)) as stream:
                async for chunks in stream:
                    for chunk in chunks:
                        if chunk.finish in (FinishReason.ABORT, FinishReason.ERROR):
                            raise Rejected(f"the request ended early: {chunk.error or 'aborted'}", status=500)
                        self.num_generated += chunk.num_tokens
                        if chunk.version:
                            self._envelope["system_fingerprint"] = chunk.version
                    yield [(index_of[chunk.request_id], chunk) for chunk in chunks]
        except EngineUnavailable as error:
            self._admission.settle(0)  # nothing was computed
            raise unavailable(str(error)) from error
        finally:
            self._admission.settle(num_prompt + self.num_generated)


def check_ready(engine: TextEngine) -> None:
    """Before anything starts.

    Raises:
        Rejected: 503 where the engine takes no request now.
    """
    status = engine.status()
    if not status.is_ready:
        raise unavailable(status.failure or "the server is starting or shutting down")


class EventStream(StreamingResponse):
    """Server-sent events; closes its generator when the client goes, so that its requests end then, not later."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def event_stream(
    steps: AsyncGenerator[Step, None],
    *,
    first: Step,
    write: Callable[[Step], Sequence[Mapping[str, Any]]],
    last: Callable[[], Sequence[Mapping[str, Any]]],
) -> AsyncGenerator[bytes, None]:
    """Events of every step, those that `last` gives, and `[DONE]`; one write a step."""
    try:
        async with contextlib.aclosing(steps):
            body = write(first)
            while True:
                if body:
                    yield b"".join(map(event, body))
                try:
                    body = write(await anext(steps))
                except StopAsyncIteration:
                    break
    except Rejected as error:  # the status line is sent; the event is all that is left
        yield event(error.body())
        return
    yield b"".join((*map(event, last()), DONE))


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def usage(*, num_prompt: int, num_generated: int) -> dict[str, int]:
    """OpenAI's shape."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
