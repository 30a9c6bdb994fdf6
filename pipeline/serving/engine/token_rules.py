"""What one running request knows about its next token.

Owns the token counts behind penalties and the place in a grammar, both advanced on the host. Knows nothing of devices,
text or the batch. The one decision: counts are a list of the tokens a request has seen, not an array over the
vocabulary, so what a step moves to the device is bounded by the context.

Shape suffixes: W 32-bit words of a mask over the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.serving.engine.request import GrammarMatcher, Sampling

NOT_SEEN = -1
"""Count of a token that has a bias and stands in neither prompt nor completion."""


class Ranks(NamedTuple):
    """Natural logarithms of probabilities."""

    logprob: float
    """Of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""


class Chosen(NamedTuple):
    """New tokens of one request."""

    tokens: list[int]
    ranks: tuple[Ranks, ...] = ()
    """One for each token, where they were asked for."""


class TokenCounts:
    """How often a completion has each token, with prompt tokens at 0 and biased ones at `NOT_SEEN`."""

    def __init__(self, sampling: Sampling, *, prompt: Sequence[int]) -> None:
        seen = np.unique(np.asarray(prompt, np.int32)) if _has_penalty(sampling) else np.zeros(0, np.int32)
        biased = np.setdiff1d(np.fromiter(sampling.logit_bias, np.int32), seen)
        listed = np.concatenate([seen, biased])
        room = len(listed) + (sampling.max_tokens if _has_penalty(sampling) else 0)
        self.size = len(listed)
        """Entries in use of the three arrays."""
        self.tokens, self.counts, self.bias = np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room)
        self.tokens[: self.size] = listed
        self.counts[len(seen) : self.size] = NOT_SEEN
        self._places = {int(token): place for place, token in enumerate(listed)}
        self._is_counting = _has_penalty(sampling)
        for token, bias in sampling.logit_bias.items():
            self.bias[self._places[token]] = bias

    def add(self, tokens: Sequence[int]) -> None:
        """Count generated tokens."""
        if not self._is_counting:
            return
        for token in tokens:
            place = self._places.setdefault(token, self.size)
            if place == self.size:
                self.tokens[place] = token
                self.size += 1
            self.counts[place] = max(int(self.counts[place]), 0) + 1


class TokenRules:
    """The rules for the next token of one request."""

    def __init__(self, sampling: Sampling, *, prompt: Sequence[int]) -> None:
        """Raises `GrammarError` where the grammar is too costly for its first token."""
        self.sampling = sampling
        self.counts = TokenCounts(sampling, prompt=prompt) if sampling.logit_bias or _has_penalty(sampling) else None
        self._matcher: GrammarMatcher | None = None if sampling.grammar is None else sampling.grammar.start()
        self.mask_W: np.ndarray | None = None if self._matcher is None else self._matcher.mask()
        """uint32; None where every token is allowed."""

    @property
    def is_plain(self) -> bool:
        """True where temperature and cuts are all there is."""
        return self.counts is None and self._matcher is None and self.sampling.logprobs is None

    @property
    def num_adjusted(self) -> int:
        """Tokens whose logits change."""
        return 0 if self.counts is None else self.counts.size

    @property
    def is_finished(self) -> bool:
        """True where the grammar lets nothing but an end of text follow."""
        return self._matcher is not None and self._matcher.is_finished

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in generated tokens, of which a stop token is none.

        Raises:
            GrammarError: the grammar is too costly to follow.
        """
        if self.counts is not None:
            self.counts.add(tokens)
        if self._matcher is not None:
            self._matcher.accept(tokens)
            if not self._matcher.is_finished:
                self.mask_W = self._matcher.mask()


def _has_penalty(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
