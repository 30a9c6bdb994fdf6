"""Tokens to text while they arrive.

Owns incremental decoding and the search for stop strings. Knows nothing of the model. The one decision: a character is
sent only when no later token can change it, so the pieces always add up to the text of the whole.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING_CHARACTERS = 3
"""A UTF-8 sequence that lacks its end shows as one replacement character (byte-level BPE) or as one for each of its
at most three bytes (byte fallback); those, at the very end, may still change."""


class Decoder(Protocol):
    """Tokens to text; `vocabulary.py` has it."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of tokens that stand together."""
        ...

    def spelled(self, token: int) -> tuple[str, bytes]:
        """Text and UTF-8 of one token alone."""
        ...


class Detokenizer:
    """The growing text of one request."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        # Decoding starts at `_first`, a few tokens back, because some decoders strip a space at the start of a text.
        self._first = 0
        self._read = 0
        self._num_sent = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        self._tokens.extend(tokens)
        text = self._window()
        settled = text
        for _ in range(MAX_PENDING_CHARACTERS):
            settled = settled.removesuffix(REPLACEMENT)
        new = settled[self._num_sent :]
        self._num_sent = max(self._num_sent, len(settled))
        if len(settled) == len(text):
            self._advance()
        return new

    def finish(self) -> str:
        """What was held back; no token follows."""
        new = self._window()[self._num_sent :]
        self._num_sent += len(new)
        return new

    def _window(self) -> str:
        before = self._decode(self._tokens[self._first : self._read])
        return self._decode(self._tokens[self._first :])[len(before) :]

    def _advance(self) -> None:
        self._first, self._read, self._num_sent = self._read, len(self._tokens), 0

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=True) if tokens else ""


class StopStrings:
    """Holds text back while it may be the start of a stop string, and cuts at the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_hit = False

    def add(self, text: str) -> str:
        """The text that may be sent; sets `is_hit` where a stop string came, which is not part of the text."""
        if not self._stops:
            return text
        self._held += text
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            self.is_hit = True
            sent, self._held = self._held[: min(starts)], ""
            return sent
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent

    def finish(self) -> str:
        """What was held back; no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
