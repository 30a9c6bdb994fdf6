"""What a client asks of the engine and what the engine says back.

Owns the values that cross between HTTP, engine and scheduler. Pure. The one decision: everything that can be refused is
refused before a value of these types exists, so the engine never meets an invalid request.

Shape suffixes: W 32-bit words, one bit a token of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

MAX_STOP_IDS = 8
"""Stop tokens of one request; their number is a shape of the decode executable."""
MAX_LOGIT_BIAS = 300
"""Entries of one request's `logit_bias`, as at OpenAI; their number is a shape of the sampling executable."""
MAX_LOGPROBS = 20
"""Alternatives a token, as at OpenAI; a deployment may allow fewer."""


class FinishReason(StrEnum):
    """Why a completion ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarError(Exception):
    """A running constraint met its own limits; its request fails, and no other."""


class GrammarMatcher(Protocol):
    """Where one completion stands in its grammar."""

    @property
    def is_finished(self) -> bool:
        """True where nothing but an end of text can follow."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by generated tokens.

        Raises:
            GrammarError: they do not fit, or the grammar is too costly to follow.
        """
        ...

    def mask(self) -> Any:
        """The tokens that may come next; uint32 [W], token t at bit t % 32 of word t // 32. Not to be written to.

        Raises:
            GrammarError: the grammar is too costly to follow.
        """
        ...


class Grammar(Protocol):
    """A compiled constraint on the text of a completion; immutable, and shared by requests."""

    def start(self) -> GrammarMatcher:
        """A matcher before the first token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, and when to end."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    seed: int = 0
    """The same seed gives the same tokens, alone or in a batch; 32 bits are used."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """Drops tokens less likely than this share of the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 0; divides positive and multiplies negative logits of tokens of prompt and completion; 1 is none."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the completion has."""
    frequency_penalty: float = 0.0
    """As that, once for each time."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; at most `MAX_LOGIT_BIAS`."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives; None reports nothing."""
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to continue once."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedToken:
    """A token with its log-probability."""

    token: int
    logprob: float
    """Natural logarithm; of the model's own distribution, before bias, penalties, temperature and grammar."""
    text: str
    """Of the token alone, with replacement characters for bytes that are no whole character; a special token's name."""
    bytes: bytes
    """UTF-8 of what it stands for, which may be a part of a character; empty for a special token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """A generated token among its alternatives."""

    chosen: RankedToken
    top: tuple[RankedToken, ...]
    """The most likely tokens, best first; as many as were asked for. The chosen one need not be among them."""
    text_offset: int
    """Characters of the completion before the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one engine step brought for one request; the last one has `finish`."""

    request_id: str
    text: str
    num_tokens: int
    """New tokens in this chunk (a stop token counts, as in OpenAI's usage)."""
    finish: FinishReason | None = None
    error: str = ""
    version: str = ""
    """Of the parameters that it was computed with."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Where they were asked for: of the tokens whose text this chunk brings, so of no stop token and of nothing behind
    the start of a stop string."""
