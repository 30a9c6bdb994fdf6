"""The fields of a body that say how tokens are chosen and when to end.

Owns the rules that completions and chat completions share. Pure. The one decision: a field is either computed, or
refused unless its value changes nothing, or named as ignored in the documentation; none is dropped in silence.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.serving.engine.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, Grammar, Sampling
from pipeline.serving.json_body import Fields, Rejected, is_tokens, shown

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PENALTY = 2.0
"""OpenAI's bound on presence and frequency penalty."""
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0

FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "logit_bias", "stop", "stop_token_ids", "n", "stream", "stream_options", "logprobs"),
)
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
"""About accounts and records that this server does not keep; they cannot change an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a body is judged against."""

    name: str
    context: int
    num_tokens: int
    """Size of the model's vocabulary."""
    stop_ids: tuple[int, ...]
    """End-of-text tokens."""
    max_logprobs: int = MAX_LOGPROBS
    """Alternatives a token; 0 where log-probabilities are not computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFields:
    """Everything but the length, which each endpoint has in its own words."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    num_choices: int
    is_stream: bool
    include_usage: bool

    def sampling(self, *, choice: int, max_tokens: int, logprobs: int | None, grammar: Grammar | None) -> Sampling:
        """Of the choice that has this index; choices of one prompt differ in their seed alone."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=(self.seed + choice % self.num_choices) & 0xFFFFFFFF,
            stop=self.stop,
            stop_ids=self.stop_ids,
            logprobs=logprobs,
            grammar=grammar,
        )


def read_sampling(reader: Fields, *, model: ServedModel) -> SamplingFields:
    """Judge the shared fields; complaints are left in `reader`."""
    is_stream = reader.boolean("stream")
    return SamplingFields(
        temperature=reader.number("temperature", default=1.0, low=0.0, high=2.0),
        top_k=reader.integer("top_k", default=0, low=0, high=model.num_tokens),
        top_p=reader.number("top_p", default=1.0, low=0.0, high=1.0, is_low_open=True),
        min_p=reader.number("min_p", default=0.0, low=0.0, high=1.0),
        repetition_penalty=reader.number(
            "repetition_penalty", default=1.0, low=0.0, high=MAX_REPETITION_PENALTY, is_low_open=True
        ),
        presence_penalty=reader.number("presence_penalty", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        frequency_penalty=reader.number("frequency_penalty", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        logit_bias=_logit_bias(reader, num_tokens=model.num_tokens),
        seed=reader.integer("seed", default=secrets.randbits(32), low=-(2**63), high=2**63 - 1),
        stop=_stops(reader),
        stop_ids=_stop_ids(reader, model=model),
        num_choices=reader.integer("n", default=1, low=1, high=MAX_CHOICES),
        is_stream=is_stream,
        include_usage=_include_usage(reader, is_stream=is_stream),
    )


def read_top(reader: Fields, name: str, *, is_asked: bool, model: ServedModel) -> int | None:
    """How many alternatives a token are told; None where no log-probabilities are asked for."""
    if not is_asked:
        return None
    if not model.max_logprobs:
        reader.complain("logprobs", "are not computed by this deployment (max_logprobs: 0)")
        return None
    return reader.integer(name, default=0, low=0, high=model.max_logprobs)


def refuse_unless_neutral(reader: Fields, reasons: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Complain of fields that this server does not compute, unless their value changes nothing.

    `reasons` gives, by field, the values that change nothing, and why no other is taken.
    """
    for name, (neutral, reason) in reasons.items():
        value = reader.fields.get(name)
        # Booleans equal 0 and 1 in Python but are another type in JSON.
        if not any(type(value) is type(item) and value == item for item in (None, *neutral)):
            reader.complain(name, f"{reason}; found {shown(value)}; leave it out")


def check_context(longest: int, *, max_tokens: int, context: int, name: str, length_name: str = "max_tokens") -> None:
    """Hold the longest prompt and the completion against the context.

    Raises:
        Rejected: they do not fit, with the arithmetic; `name` is the field of the prompt.
    """
    if longest + max_tokens > context:
        raise Rejected(
            f"this model's context is {context} tokens, but the request needs {longest + max_tokens}: {longest} in the "
            f"prompt and {max_tokens} for the completion; shorten the prompt or lower {length_name}",
            param=name if longest >= context else length_name,
            code="context_length_exceeded",
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


def _stop_ids(reader: Fields, *, model: ServedModel) -> tuple[int, ...]:
    """The model's own and those of the request."""
    own = model.stop_ids[:MAX_STOP_IDS]
    value = reader.fields.get("stop_token_ids")
    if value is None or value == []:
        return own
    if not is_tokens(value):
        reader.complain("stop_token_ids", f"must be a list of tokens, found {shown(value)}")
        return own
    outside = [token for token in value if not 0 <= token < model.num_tokens]
    if outside:
        reader.complain("stop_token_ids", f"has token {outside[0]}; the model has 0 to {model.num_tokens - 1}")
    together = tuple(dict.fromkeys((*own, *value)))
    if len(together) > MAX_STOP_IDS:
        reader.complain(
            "stop_token_ids",
            f"with the {len(own)} end tokens of the model these are {len(together)}, {MAX_STOP_IDS} are allowed",
        )
    return together


def _logit_bias(reader: Fields, *, num_tokens: int) -> dict[int, float]:
    value = reader.fields.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        reader.complain("logit_bias", f"must be an object from tokens to numbers, found {shown(value)}")
        return {}
    if len(value) > MAX_LOGIT_BIAS:
        reader.complain("logit_bias", f"has {len(value)} tokens, {MAX_LOGIT_BIAS} are allowed")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        if not (token.isascii() and token.isdigit() and str(int(token[:20])) == token and int(token) < num_tokens):
            reader.complain("logit_bias", f"has token {shown(token)}; the model has 0 to {num_tokens - 1}")
        elif isinstance(amount, bool) or not isinstance(amount, int | float) or not -MAX_BIAS <= amount <= MAX_BIAS:
            reader.complain("logit_bias", f"must be from -100 to 100, found {shown(amount)} for token {token}")
        else:
            bias[int(token)] = float(amount)
            continue
        break
    return bias
