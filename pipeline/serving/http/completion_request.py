"""The body of `/v1/completions`, read and judged.

Owns every rule about what a client may ask there. Pure. The one decision: a body is judged completely, with all
complaints in one answer, before anything starts, so an error is always a 4xx status and never an event in a stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.serving.grammar import response_format
from pipeline.serving.grammar.response_format import Constraint, read_constraint
from pipeline.serving.http.sampling_fields import (
    FIELDS,
    IGNORED,
    MAX_CHOICES,
    SamplingFields,
    ServedModel,
    check_context,
    read_sampling,
    read_top,
    refuse_unless_neutral,
)
from pipeline.serving.json_body import Fields, is_tokens, shown

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
READ = ("model", "prompt", "max_tokens", "echo", *FIELDS, *response_format.FIELDS)
NOT_COMPUTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "choices are not ranked by this server; ask for n of them"),
    "suffix": (("",), "this server continues a text and does not fill a gap in one"),
}


class Encoding(Protocol):
    """What `tokenizers` gives back."""

    @property
    def ids(self) -> list[int]:
        """Tokens."""
        ...


class Encoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding:
        """Text to tokens."""
        ...


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
    fields: SamplingFields
    max_tokens: int
    logprobs: int | None
    """Alternatives a token; None where none were asked for."""
    is_echo: bool
    constraint: Constraint | None

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.fields.num_choices

    def prompt_of(self, choice: int) -> Prompt:
        """Of the choice that has this index."""
        return self.prompts[choice // self.fields.num_choices]


def parse_completion(fields: Mapping[str, Any], *, model: ServedModel, encoder: Encoder) -> CompletionRequest:
    """Judge a body that names this model.

    Raises:
        Rejected: 400 with every complaint.
    """
    reader = Fields(fields)
    max_tokens = reader.integer("max_tokens", default=DEFAULT_MAX_TOKENS, low=1, high=model.context)
    sampling = read_sampling(reader, model=model)
    is_echo = reader.boolean("echo")
    logprobs = read_top(reader, "logprobs", is_asked=fields.get("logprobs") is not None, model=model)
    constraint = read_constraint(reader)
    prompts = _prompts(reader, model=model, encoder=encoder)
    if len(prompts) * sampling.num_choices > MAX_CHOICES:
        reader.complain(
            "n", f"{len(prompts)} prompts times n = {sampling.num_choices} is more than {MAX_CHOICES} choices"
        )
    if is_echo and fields.get("logprobs") is not None:
        reader.complain("logprobs", "log-probabilities of a prompt are not computed; leave out echo or logprobs")
    refuse_unless_neutral(reader, NOT_COMPUTED)
    reader.refuse_unknown((*READ, *NOT_COMPUTED, *IGNORED))
    reader.raise_complaints()
    longest = max(len(prompt.tokens) for prompt in prompts)
    check_context(longest, max_tokens=max_tokens, context=model.context, name="prompt")
    return CompletionRequest(
        prompts=prompts,
        fields=sampling,
        max_tokens=max_tokens,
        logprobs=logprobs,
        is_echo=is_echo,
        constraint=constraint,
    )


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
