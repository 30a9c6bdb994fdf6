"""The body of `/v1/completions`, read and judged.

Owns every rule about what a client may ask. Pure. The one decision: a body is judged completely, with all complaints in
one answer, before anything starts, so an error is always a 4xx status and never an event in a stream.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pipeline.serving.json_body import Fields, Rejected, check_model, is_tokens, json_object, shown
from pipeline.serving.request import MAX_STOP_IDS, Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Fields of OpenAI's that this server does not compute: only the value that changes nothing is taken."""
_IGNORED = ("user",)
_READ = (
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stream", "stream_options", "stop"),
    *("seed", "echo"),
)
FIELDS = (*_READ, *_NEUTRAL, *_IGNORED)


class Encoding(Protocol):
    """What `tokenizers` gives back."""

    @property
    def ids(self) -> list[int]:
        """Tokens."""
        ...


class Encoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def encode(self, sequence: str) -> Encoding:
        """Text to tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What the body is judged against."""

    name: str
    context: int
    num_tokens: int
    """Size of the model's vocabulary."""
    stop_ids: tuple[int, ...]
    """End-of-text tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, as tokens and as the client would see it echoed."""

    tokens: tuple[int, ...]
    text: str | None
    """None where the client sent tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A body without faults."""

    prompts: tuple[Prompt, ...]
    num_choices: int
    """For each prompt."""
    sampling: Sampling
    is_stream: bool
    include_usage: bool
    is_echo: bool

    def sampling_of(self, choice: int) -> Sampling:
        """Of the choice that has this index; choices of one prompt differ in their seed alone."""
        return replace(self.sampling, seed=(self.sampling.seed + choice % self.num_choices) & 0xFFFFFFFF)


def parse_completion(body: bytes, *, model: ServedModel, encoder: Encoder) -> CompletionRequest:
    """Judge a body.

    Raises:
        Rejected: 400 with every complaint, 404 where the model is another.
    """
    fields = json_object(body)
    reader = Fields(fields)
    check_model(fields.get("model"), name=model.name)
    max_tokens = reader.integer("max_tokens", default=DEFAULT_MAX_TOKENS, low=1, high=model.context)
    temperature = reader.number("temperature", default=1.0, low=0.0, high=2.0)
    top_p = reader.number("top_p", default=1.0, low=0.0, high=1.0, is_low_open=True)
    top_k = reader.integer("top_k", default=0, low=0, high=model.num_tokens)
    num_choices = reader.integer("n", default=1, low=1, high=MAX_CHOICES)
    seed = reader.integer("seed", default=secrets.randbits(32), low=-(2**63), high=2**63 - 1)
    is_stream, is_echo = reader.boolean("stream"), reader.boolean("echo")
    include_usage = _include_usage(reader, is_stream=is_stream)
    stop = _stops(reader)
    prompts = _prompts(reader, model=model, encoder=encoder)
    if len(prompts) * num_choices > MAX_CHOICES:
        reader.complain("n", f"{len(prompts)} prompts times n = {num_choices} is more than {MAX_CHOICES} choices")
    _check_rest(reader)
    reader.raise_complaints()
    _check_context(prompts, max_tokens=max_tokens, context=model.context)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed & 0xFFFFFFFF,
        stop=stop,
        stop_ids=model.stop_ids[:MAX_STOP_IDS],
    )
    return CompletionRequest(
        prompts=prompts,
        num_choices=num_choices,
        sampling=sampling,
        is_stream=is_stream,
        include_usage=include_usage,
        is_echo=is_echo,
    )


def _include_usage(reader: Fields, *, is_stream: bool) -> bool:
    options = reader.fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        reader.complain("stream_options", f'must be {{"include_usage": true}}, found {shown(options)}')
        return False
    if not is_stream:
        reader.complain("stream_options", "is only allowed with stream: true")
    value = options.get("include_usage", False)
    if not isinstance(value, bool):
        reader.complain("stream_options", f"include_usage must be true or false, found {shown(value)}")
        return False
    return value


def _stops(reader: Fields) -> tuple[str, ...]:
    value = reader.fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        reader.complain("stop", f"must be a string or a list of strings, found {shown(value)}")
        return ()
    if len(stops) > MAX_STOPS:
        reader.complain("stop", f"has {len(stops)} strings, {MAX_STOPS} are allowed")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        reader.complain("stop", f"each string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _prompts(reader: Fields, *, model: ServedModel, encoder: Encoder) -> tuple[Prompt, ...]:
    given = reader.texts("prompt", most=MAX_CHOICES, called="prompts")
    prompts = [_prompt(reader, index, item, encoder=encoder) for index, item in enumerate(given)]
    for index, prompt in enumerate(prompts):
        outside = [token for token in prompt.tokens if not 0 <= token < model.num_tokens]
        if outside:
            reader.complain("prompt", f"item {index} has token {outside[0]}; the model has 0 to {model.num_tokens - 1}")
    return tuple(prompts)


def _prompt(reader: Fields, index: int, item: object, *, encoder: Encoder) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(tokens=tuple(encoder.encode(item).ids), text=item)
        if not prompt.tokens:
            reader.complain("prompt", f"item {index} is empty; the model needs at least one token to start from")
        return prompt
    if isinstance(item, list) and is_tokens(item):
        return Prompt(tokens=tuple(item), text=None)
    reader.complain("prompt", f"item {index} must be a string or a list of tokens, found {shown(item)}")
    return Prompt(tokens=(), text=None)


def _check_rest(reader: Fields) -> None:
    for name, neutral in _NEUTRAL.items():
        value = reader.fields.get(name)
        # Booleans equal 0 and 1 in Python but are another type in JSON.
        if isinstance(value, bool) or value not in neutral:
            reader.complain(name, f"is not supported by this server, found {shown(value)}; leave it out")
    reader.refuse_unknown(FIELDS)


def _check_context(prompts: tuple[Prompt, ...], *, max_tokens: int, context: int) -> None:
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + max_tokens > context:
        raise Rejected(
            f"this model's context is {context} tokens, but the request needs {longest + max_tokens}: {longest} in the "
            f"prompt and {max_tokens} for the completion; shorten the prompt or lower max_tokens",
            param="prompt" if longest >= context else "max_tokens",
            code="context_length_exceeded",
        )
