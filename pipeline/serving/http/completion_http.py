"""`/v1/completions` in OpenAI's shapes.

Owns the bodies of its answers. Knows nothing of Ray and nothing of jax.
"""

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from pipeline.serving.engine.request import Chunk, TokenLogprobs
from pipeline.serving.http.completion_request import CompletionRequest, parse_completion
from pipeline.serving.http.http_routes import TEXT_AT_ONCE, aside, until_disconnect
from pipeline.serving.http.model_registry import Asked
from pipeline.serving.http.running_choices import EventStream, RunningChoices, Step, check_ready, event_stream, usage
from pipeline.serving.http.text_surface import TextSurface


async def complete(surface: TextSurface, asked: Asked) -> Response:
    """Judge the body, and answer it whole or as a stream.

    Raises:
        Rejected: the body has faults, or the engine is not available.
        RateLimited: the client has to wait.
    """
    fields = asked.fields
    assert fields is not None
    parsed = await aside(
        lambda: parse_completion(fields, model=surface.model, encoder=surface.encoder),
        num_bytes=len(asked.body),
        at_once=TEXT_AT_ONCE,
    )
    check_ready(surface.engine)
    grammar = await surface.compiled(parsed.constraint)
    choices = range(parsed.num_choices)
    prompts = [parsed.prompt_of(choice).tokens for choice in choices]
    answer = _Answer(surface, parsed)
    running = RunningChoices(
        surface.connected(),
        request_id=answer.id,
        prompts=prompts,
        samplings=[
            parsed.fields.sampling(
                choice=choice, max_tokens=parsed.max_tokens, logprobs=parsed.logprobs, grammar=grammar
            )
            for choice in choices
        ],
        admission=asked.meter.admit(num_tokens=sum(map(len, prompts)) + len(prompts) * parsed.max_tokens),
        envelope=answer.envelope,
    )
    if not parsed.fields.is_stream:
        return await until_disconnect(asked.request, answer.whole(running))
    steps = running.steps()
    first = await until_disconnect(asked.request, anext(steps))
    return EventStream(event_stream(steps, first=first, write=answer.bodies, last=lambda: answer.last(running)))


class _Answer:
    """The shapes of one answer."""

    def __init__(self, surface: TextSurface, parsed: CompletionRequest) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._surface = surface
        self._parsed = parsed
        self.envelope = surface.envelope(self.id, kind="text_completion", created=int(time.time()))
        self._extra: dict[str, Any] = {"usage": None} if parsed.fields.include_usage else {}
        self._to_echo = {choice: self._echo(choice) for choice in range(parsed.num_choices)}

    async def whole(self, running: RunningChoices) -> Response:
        """One body."""
        texts = dict(self._to_echo)
        logprobs: dict[int, list[TokenLogprobs]] = {choice: [] for choice in texts}
        reasons: dict[int, str | None] = {}
        async with contextlib.aclosing(running.steps()) as steps:
            async for step in steps:
                for choice, chunk in step:
                    texts[choice] += chunk.text
                    logprobs[choice] += chunk.logprobs
                    reasons[choice] = _reason(chunk)
        choices = [self._choice(choice, text, reasons[choice], logprobs[choice]) for choice, text in texts.items()]
        return JSONResponse({**self.envelope, "choices": choices, "usage": self._usage(running)})

    def bodies(self, step: Step) -> list[dict[str, Any]]:
        """Of the events of one step."""
        bodies = []
        for choice, chunk in step:
            text = self._to_echo.pop(choice, "") + chunk.text
            if text or chunk.logprobs or chunk.finish is not None:
                shown = self._choice(choice, text, _reason(chunk), chunk.logprobs)
                bodies.append({**self.envelope, "choices": [shown], **self._extra})
        return bodies

    def last(self, running: RunningChoices) -> list[dict[str, Any]]:
        """After the last step."""
        if not self._parsed.fields.include_usage:
            return []
        return [{**self.envelope, "choices": [], "usage": self._usage(running)}]

    def _usage(self, running: RunningChoices) -> dict[str, int]:
        num_prompt = sum(len(prompt.tokens) for prompt in self._parsed.prompts)
        return usage(num_prompt=num_prompt, num_generated=running.num_generated)

    def _echo(self, choice: int) -> str:
        if not self._parsed.is_echo:
            return ""
        prompt = self._parsed.prompt_of(choice)
        if prompt.text is not None:
            return prompt.text
        return self._surface.decoder.decode(prompt.tokens, skip_special_tokens=False)

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        shown = None if self._parsed.logprobs is None else _logprobs(logprobs)
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


def _reason(chunk: Chunk) -> str | None:
    return None if chunk.finish is None else chunk.finish.value


def _logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """OpenAI's four lists; in `top_logprobs`, tokens of one text share a place, where the likeliest stays."""
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [
            {ranked.text: ranked.logprob for ranked in (token.chosen, *reversed(token.top))} for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }
