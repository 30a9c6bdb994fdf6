"""Which rows share a forward pass, and what each pass is padded to.

Owns the split. Pure. The one decision: on a device whose time grows with every padded number, a batch is split so that
its passes together cost least, each its padded tokens and what a pass costs by itself; on any other, all rows are one
pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.serving.engine.buckets import smallest_fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Rows, by index, and the shape they are padded to."""

    rows: tuple[int, ...]
    batch: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShapes:
    """The compiled shapes."""

    batches: tuple[int, ...]
    """Ascending."""
    lengths: tuple[int, ...] = (0,)
    """Ascending; (0,) where nothing is padded."""
    most_tokens: int | None = None
    """Of one pass, where time grows with each; None where a pass costs about the same whatever is in it."""
    tokens_of_pass: int = 0
    """What a pass costs by itself, in padded tokens: reading the weights once more, and its start."""

    def compiled(self) -> list[tuple[int, int]]:
        """Every (batch, length), smallest first."""
        return sorted((batch, length) for length in self.lengths for batch in self.batches_of(length))

    def batches_of(self, length: int) -> tuple[int, ...]:
        """The batch sizes at this length; always one, the smallest."""
        most = self.most_tokens
        return tuple(
            batch for batch in self.batches if most is None or batch * length <= most or batch == self.batches[0]
        )

    def split(self, lengths: Sequence[int]) -> list[Pass]:
        """Passes for rows of these lengths; every row is in one.

        Raises:
            ValueError: a row is longer than the longest shape, or there are more rows than the largest batch holds.
        """
        if self.most_tokens is None:
            batch = smallest_fit(len(lengths), self.batches)
            return [Pass(rows=tuple(range(len(lengths))), batch=batch, length=smallest_fit(max(lengths), self.lengths))]
        rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        best = self._cheapest([smallest_fit(lengths[row], self.lengths) for row in rows])
        passes = []
        while rows:
            batch, length = best[len(rows)]
            passes.append(Pass(rows=tuple(rows[:batch]), batch=batch, length=length))
            rows = rows[batch:]
        return passes

    def _cheapest(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Size and length of the first of the passes for the last 0, 1, ... of rows, whose lengths descend."""
        costs, best = [0], [(0, 0)]
        for num_left in range(1, len(lengths) + 1):
            length = lengths[-num_left]
            cost, size = min(
                (self.tokens_of_pass + size * length + costs[max(num_left - size, 0)], size)
                for size in self.batches_of(length)
            )
            costs.append(cost)
            best.append((size, length))
        return best
