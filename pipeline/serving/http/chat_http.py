"""`/v1/chat/completions` in OpenAI's shapes.

Owns the bodies of its answers. Knows nothing of Ray and nothing of jax.
"""

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from pipeline.serving.engine.request import Chunk, FinishReason, RankedToken, TokenLogprobs
from pipeline.serving.http.chat_request import ChatRequest, parse_chat
from pipeline.serving.http.chat_tool_calls import Said, ToolCall, ToolCallReader
from pipeline.serving.http.http_routes import TEXT_AT_ONCE, aside, until_disconnect
from pipeline.serving.http.model_registry import Asked
from pipeline.serving.http.running_choices import EventStream, RunningChoices, Step, check_ready, event_stream, usage
from pipeline.serving.http.text_surface import TextSurface


async def chat(surface: TextSurface, asked: Asked) -> Response:
    """Judge the body, and answer it whole or as a stream.

    Raises:
        Rejected: the body has faults, or the engine is not available.
        RateLimited: the client has to wait.
    """
    fields = asked.fields
    assert fields is not None

    def judge() -> ChatRequest:
        return parse_chat(fields, model=surface.model, template=surface.template, encoder=surface.encoder)

    parsed = await aside(judge, num_bytes=len(asked.body), at_once=TEXT_AT_ONCE)
    check_ready(surface.engine)
    grammar = await surface.compiled(parsed.constraint)
    answer = _Answer(surface, parsed)
    num_choices = parsed.fields.num_choices
    running = RunningChoices(
        surface.connected(),
        request_id=answer.id,
        prompts=[parsed.prompt] * num_choices,
        samplings=[
            parsed.fields.sampling(
                choice=choice, max_tokens=parsed.max_tokens, logprobs=parsed.logprobs, grammar=grammar
            )
            for choice in range(num_choices)
        ],
        admission=asked.meter.admit(num_tokens=num_choices * (len(parsed.prompt) + parsed.max_tokens)),
        envelope=answer.envelope,
    )
    if not parsed.fields.is_stream:
        return await until_disconnect(asked.request, answer.whole(running))
    steps = running.steps()
    first = await until_disconnect(asked.request, anext(steps))
    return EventStream(event_stream(steps, first=first, write=answer.bodies, last=lambda: answer.last(running)))


class _Choice:
    """One message while it arrives."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        self._reader = ToolCallReader(frozenset(tool_names)) if tool_names else None
        self.num_calls = 0
        self.has_begun = False

    def add(self, chunk: Chunk) -> Said:
        """What became certain with this chunk."""
        if self._reader is None:
            return Said(chunk.text)
        said = self._reader.add(chunk.text)
        if chunk.finish is not None:
            said += self._reader.finish()
        self.num_calls += len(said.calls)
        return said

    def reason(self, chunk: Chunk) -> str | None:
        """Why it ended."""
        if chunk.finish is FinishReason.STOP and self.num_calls:
            return "tool_calls"
        return None if chunk.finish is None else chunk.finish.value


class _Answer:
    """The shapes of one answer."""

    def __init__(self, surface: TextSurface, parsed: ChatRequest) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._parsed = parsed
        kind = "chat.completion.chunk" if parsed.fields.is_stream else "chat.completion"
        self.envelope = surface.envelope(self.id, kind=kind, created=int(time.time()))
        self._extra: dict[str, Any] = {"usage": None} if parsed.fields.include_usage else {}
        self._choices = [_Choice(parsed.tool_names) for _ in range(parsed.fields.num_choices)]

    async def whole(self, running: RunningChoices) -> Response:
        """One body."""
        said = [Said() for _ in self._choices]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self._choices]
        reasons: list[str | None] = [None for _ in self._choices]
        async with contextlib.aclosing(running.steps()) as steps:
            async for step in steps:
                for index, chunk in step:
                    said[index] += self._choices[index].add(chunk)
                    logprobs[index] += chunk.logprobs
                    reasons[index] = self._choices[index].reason(chunk)
        choices = [
            {
                "index": index,
                "message": _message(said[index]),
                "logprobs": self._logprobs(logprobs[index]),
                "finish_reason": reasons[index],
            }
            for index in range(len(self._choices))
        ]
        return JSONResponse({**self.envelope, "choices": choices, "usage": self._usage(running)})

    def bodies(self, step: Step) -> list[dict[str, Any]]:
        """Of the events of one step."""
        bodies = []
        for index, chunk in step:
            choice = self._choices[index]
            num_before = choice.num_calls
            delta = _delta(choice.add(chunk), first_call=num_before)
            if not choice.has_begun:
                delta = {"role": "assistant", "content": "", **delta}
                choice.has_begun = True
            if delta or chunk.logprobs or chunk.finish is not None:
                shown = {
                    "index": index,
                    "delta": delta,
                    "logprobs": self._logprobs(chunk.logprobs),
                    "finish_reason": choice.reason(chunk),
                }
                bodies.append({**self.envelope, "choices": [shown], **self._extra})
        return bodies

    def last(self, running: RunningChoices) -> list[dict[str, Any]]:
        """After the last step."""
        if not self._parsed.fields.include_usage:
            return []
        return [{**self.envelope, "choices": [], "usage": self._usage(running)}]

    def _usage(self, running: RunningChoices) -> dict[str, int]:
        return usage(num_prompt=len(self._parsed.prompt), num_generated=running.num_generated)

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._parsed.logprobs is None:
            return None
        content = [
            {**_ranked(token.chosen), "top_logprobs": [_ranked(other) for other in token.top]} for token in tokens
        ]
        return {"content": content, "refusal": None}


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_call(call) for call in said.calls]
    return message


def _delta(said: Said, *, first_call: int) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": said.content} if said.content else {}
    if said.calls:
        delta["tool_calls"] = [{"index": first_call + place, **_call(call)} for place, call in enumerate(said.calls)]
    return delta


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _ranked(token: RankedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
