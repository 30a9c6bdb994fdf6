"""Which dataset of a mixture each position of the global order comes from.

Owns the pattern of a mixture and a dataset's own position in it. Knows nothing of rows. The one decision: shares are
whole parts of a period, so one period is laid out once and every position, at any step, is a look-up; proportions are
within one row of exact from the start of a period to any place in it, hence within two in every window.

Shapes: N positions, K datasets, P positions of a period.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.errors import ParameterError

PARTS = 10_000
"""Shares are rounded to these."""
_Ints = npt.NDArray[np.int64]


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole parts of a period for each weight, in lowest terms; sums to `PARTS` before that (largest remainder).

    Raises:
        ParameterError: a weight is not positive, or smaller than a part.
    """
    total = math.fsum(weights)
    if not weights or min(weights) <= 0 or not math.isfinite(total):
        raise ParameterError(f"weights {list(weights)}: each must be a number above 0")
    exact = [weight / total * PARTS for weight in weights]
    parts = [math.floor(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: PARTS - sum(parts)]:
        parts[index] += 1
    if min(parts) < 1:
        raise ParameterError(
            f"weights {list(weights)}: the smallest is below 1/{PARTS} of the sum",
            hint="leave the dataset out, or give it a larger weight",
        )
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


@dataclass(frozen=True, kw_only=True)
class MixtureOrder:
    """A pure function of (parts, seed)."""

    parts: tuple[int, ...]
    """Of each dataset in one period."""
    seed: int
    """Where in its period the order begins."""

    def sources(self, positions: _Ints) -> _Ints:
        """Dataset of each position, int64 [N]."""
        return _pattern(self.parts)[(positions + self._phase) % self._period]

    def own_positions(self, positions: _Ints, *, source: int) -> _Ints:
        """How many positions before each belong to `source`, int64 [N]: its place in that dataset's own order."""
        periods, place = np.divmod(positions + self._phase, self._period)
        before = self._before(source)
        return periods * self.parts[source] + before[place] - before[self._phase]

    @property
    def _period(self) -> int:
        return sum(self.parts)

    @property
    def _phase(self) -> int:
        return self.seed * 7919 % self._period

    def _before(self, source: int) -> _Ints:
        """Positions of `source` before each place of a period, int64 [P]."""
        mine = _pattern(self.parts) == source
        return np.cumsum(mine) - mine


@lru_cache(maxsize=8)
def _pattern(parts: tuple[int, ...]) -> _Ints:
    """Dataset of each position of a period, int64 [P].

    The j-th row of a dataset with share w has its place from floor((j - 1) / w) to before ceil(j / w); taking what
    is due first meets every one of them, so counts stay within one of their share (Baruah, Cohen, Plaxton, Varvel,
    "Proportionate Progress", 1996; on one machine the earliest deadline is enough).
    """
    period = sum(parts)
    waiting = [(0, source, 1) for source in range(len(parts))]
    due: list[tuple[int, int, int]] = []
    pattern = np.empty(period, dtype=np.int64)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, row = heapq.heappop(waiting)
            heapq.heappush(due, (-(-row * period // parts[source]), source, row))
        _, source, row = heapq.heappop(due)
        pattern[place] = source
        if row < parts[source]:
            heapq.heappush(waiting, (row * period // parts[source], source, row + 1))
    pattern.flags.writeable = False  # it is shared
    return pattern
