"""Which slots are free, which tokens each slot's cache holds, and where a new prompt begins like one of them.

Owns the slots. Pure: token ids in, slots and lengths out; knows nothing of jax, queues or time. The one decision: a
slot keeps its tokens after its request has ended, and the slot that was freed first is given away first, so what many
prompts share stays in the cache for as long as other slots can be had.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]
"""int32 [length]."""
_NOTHING: Tokens = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first `num_tokens` positions of `slot`."""

    slot: int
    num_tokens: int


class PrefixIndex:
    """Slots and what they hold."""

    def __init__(self, num_slots: int, *, granularity: int) -> None:
        """Prefixes are reused in multiples of `granularity` tokens; 0 reuses nothing."""
        self._granularity = granularity
        self._held: list[Tokens] = [_NOTHING] * num_slots
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self._stale: set[int] = set()

    @property
    def free(self) -> tuple[int, ...]:
        """Free slots; the next that is given away comes first."""
        return tuple(self._free)

    def take(self, prompt: Tokens) -> Prefix:
        """Take a free slot for `prompt`, and say how many of the prompt's first tokens it holds already.

        That is the slot whose tokens the prompt goes on from, as the next turn of a conversation does; else the one
        that was freed first, even where another begins alike: that one is worth keeping, and `longest` finds it.

        Raises:
            KeyError: no slot is free.
        """
        slot, num_tokens = None, 0
        for free in self._free:
            common = self._common(free, prompt)
            if common > num_tokens and len(self._held[free]) - common < self._granularity:
                slot, num_tokens = free, common
        if slot is None:
            slot = next(iter(self._free), None)
            if slot is None:
                raise KeyError("no slot is free")
            num_tokens = self._common(slot, prompt)
        del self._free[slot]
        self._held[slot] = prompt[:num_tokens]
        return Prefix(slot=slot, num_tokens=num_tokens)

    def longest(self, prompt: Tokens, *, beyond: Prefix) -> Prefix | None:
        """The slot, free or not, that holds more of the prompt's beginning than `beyond`; None where none does."""
        best = beyond
        for slot in range(len(self._held)):
            common = self._common(slot, prompt)
            if common > best.num_tokens and slot != beyond.slot:
                best = Prefix(slot=slot, num_tokens=common)
        return None if best is beyond else best

    def hold(self, slot: int, tokens: Tokens) -> None:
        """Note what a taken slot's cache holds by now."""
        if slot not in self._stale:
            self._held[slot] = tokens

    def release(self, slot: int, *, tokens: Tokens) -> None:
        """Free a slot; `tokens` stay in its cache."""
        self.hold(slot, tokens)
        self._stale.discard(slot)
        self._free[slot] = None

    def forget(self) -> None:
        """Nothing that is cached now may be reused: it was computed with other parameters."""
        self._stale = set(range(len(self._held))) - set(self._free)
        self._held = [_NOTHING] * len(self._held)

    def _common(self, slot: int, prompt: Tokens) -> int:
        return common_beginning(self._held[slot], prompt, granularity=self._granularity)


def common_beginning(held: Tokens, prompt: Tokens, *, granularity: int) -> int:
    """Tokens that both begin with, in multiples of `granularity`; at least the prompt's last is left to compute."""
    longest = min(len(held), len(prompt) - 1)
    if not granularity or longest < granularity or not np.array_equal(held[:granularity], prompt[:granularity]):
        return 0
    differs = held[granularity:longest] != prompt[granularity:longest]
    first = int(np.argmax(differs)) if differs.any() else longest - granularity
    return (granularity + first) // granularity * granularity
