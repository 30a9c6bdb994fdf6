"""The HTTP surface of a replica that completes text, as a Starlette application.

Owns `/v1/completions`, its status codes and the shapes of OpenAI's answers. Knows nothing of Ray and nothing of jax.
The one decision: the application is complete in itself, so it is the replica's ingress under Ray Serve and runs under
any ASGI server.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipeline.serving import request as engine_request
from pipeline.serving.async_client import AsyncClient
from pipeline.serving.completion_request import CompletionRequest, Encoder, ServedModel, parse_completion
from pipeline.serving.detokenizer import Decoder
from pipeline.serving.engine import Engine
from pipeline.serving.engine_thread import EngineUnavailable
from pipeline.serving.http_routes import make_application, read_body, unavailable, until_disconnect
from pipeline.serving.json_body import Rejected
from pipeline.serving.request import Chunk, FinishReason


@dataclass(kw_only=True)
class Surface:
    """What the application answers from."""

    engine: Engine
    encoder: Encoder
    decoder: Decoder
    model: ServedModel
    facts: Mapping[str, Any]
    """Of the deployment (`name`, `digest`, `version`, ...); part of `/health`."""
    drain_seconds: float = 30.0
    created: int = field(default_factory=lambda: int(time.time()))
    client: AsyncClient | None = None

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    @property
    def card(self) -> Mapping[str, Any]:
        """What `/v1/models` says of it."""
        return {"max_model_len": self.model.context}

    def connected(self) -> AsyncClient:
        """The bridge to the loop that serves; made at the first request, which runs on it."""
        if self.client is None:
            self.client = AsyncClient(self.engine)
        return self.client


def make_app(surface: Surface) -> Starlette:
    """The application; every error has OpenAI's body. Its shutdown drains the engine."""
    return make_application(surface, routes=[Route("/v1/completions", _completions, methods=["POST"])])


async def _completions(request: Request) -> Response:
    surface: Surface = request.app.state.surface
    parsed = parse_completion(await read_body(request), model=surface.model, encoder=surface.encoder)
    answer = _Answer(surface, parsed)
    status = surface.engine.status()
    if not status.is_ready:
        raise unavailable(status.failure or "the server is starting or shutting down")
    if parsed.is_stream:
        # The first chunk is awaited here: whatever goes wrong before it is a status, not an event in the stream.
        chunks = answer.chunks()
        first = await until_disconnect(request, anext(chunks))
        return _EventStream(answer.events(first, chunks), media_type="text/event-stream")
    return await until_disconnect(request, answer.whole())


class _EventStream(StreamingResponse):
    """Closes its generator when the client goes, so that its requests end then and not when it is collected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


class _Answer:
    """The choices of one body, running together."""

    def __init__(self, surface: Surface, parsed: CompletionRequest) -> None:
        self._surface = surface
        self._parsed = parsed
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_choices = len(parsed.prompts) * parsed.num_choices
        self._num_generated = 0

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(choice, chunk) as they come; leaving early cancels every choice.

        Raises:
            Rejected: the engine is not available, or a choice failed.
        """
        merged: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(choice, merged)) for choice in range(self._num_choices)]
        try:
            num_open = self._num_choices
            while num_open:
                choice, item = await merged.get()
                if isinstance(item, EngineUnavailable):
                    raise unavailable(str(item)) from item
                if isinstance(item, Exception):
                    raise item
                if item.finish in (FinishReason.ABORT, FinishReason.ERROR):
                    raise Rejected(f"the request ended early: {item.error or 'aborted'}", status=500)
                num_open -= item.finish is not None
                self._num_generated += item.num_tokens
                yield choice, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> Response:
        """The answer as one body."""
        texts = [self._echo(choice) for choice in range(self._num_choices)]
        reasons: list[str] = [""] * self._num_choices
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for choice, chunk in chunks:
                texts[choice] += chunk.text
                if chunk.finish is not None:
                    reasons[choice] = chunk.finish.value
        choices = [_choice(index, text, reasons[index]) for index, text in enumerate(texts)]
        return JSONResponse({**self._envelope(), "choices": choices, "usage": self._usage()})

    async def events(
        self, first: tuple[int, Chunk], rest: AsyncGenerator[tuple[int, Chunk], None]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        extra = {"usage": None} if self._parsed.include_usage else {}
        echoed: set[int] = set()
        try:
            async with contextlib.aclosing(_chained(first, rest)) as chunks:
                async for choice, chunk in chunks:
                    text = chunk.text if choice in echoed else self._echo(choice) + chunk.text
                    echoed.add(choice)
                    if text or chunk.finish is not None:
                        reason = None if chunk.finish is None else chunk.finish.value
                        yield _event({**self._envelope(), "choices": [_choice(choice, text, reason)], **extra})
        except Rejected as error:  # the status line is sent; the event is all that is left
            yield _event(error.body())
            return
        if self._parsed.include_usage:
            yield _event({**self._envelope(), "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pump(self, choice: int, merged: "asyncio.Queue[tuple[int, Chunk | Exception]]") -> None:
        prompt = self._parsed.prompts[choice // self._parsed.num_choices]
        request = engine_request.Request(
            request_id=f"{self._id}-{choice}", prompt=prompt.tokens, sampling=self._parsed.sampling_of(choice)
        )
        try:
            async with contextlib.aclosing(self._surface.connected().stream(request)) as chunks:
                async for chunk in chunks:
                    merged.put_nowait((choice, chunk))
        except EngineUnavailable as error:
            merged.put_nowait((choice, error))

    def _echo(self, choice: int) -> str:
        if not self._parsed.is_echo:
            return ""
        prompt = self._parsed.prompts[choice // self._parsed.num_choices]
        return (
            self._surface.decoder.decode(prompt.tokens, skip_special_tokens=False)
            if prompt.text is None
            else prompt.text
        )

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._surface.model.name,
        }

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(len(prompt.tokens) for prompt in self._parsed.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
        }


async def _chained(
    first: tuple[int, Chunk], rest: AsyncGenerator[tuple[int, Chunk], None]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        await rest.aclose()


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
