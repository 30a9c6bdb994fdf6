"""What a client asks of the engine and what the engine says back.

Owns the values that cross between HTTP, engine and scheduler. Pure. The one decision: everything that can be refused is
refused before a value of these types exists, so the engine never meets an invalid request.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_STOP_IDS = 8
"""Stop tokens of one request; their number is a shape of the decode executable."""


class FinishReason(StrEnum):
    """Why a completion ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to continue once."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one engine step brought for one request; the last one has `finish`."""

    request_id: str
    text: str
    num_tokens: int
    """New tokens in this chunk (a stop token counts, as in OpenAI's usage)."""
    finish: FinishReason | None = None
    error: str = ""
