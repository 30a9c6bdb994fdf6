"""The global order of rows that lie in shards far away: shard by shard, and still shuffled.

Owns the shuffle that needs only a few shards at a time. Keeps no state and knows nothing of files. The one decision:
each epoch puts the shards into an order of its own, cuts it into windows of a fixed number of shards and shuffles rows
inside each window, so a reader holds one window (and fetches the next) and every position is still a pure function of
(seed, epoch, index).

Shapes: N positions, S shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.order import shuffled_rows

_SHARD_SEED = 2**32
"""Added to the seed for the order of shards, which must not follow that of rows."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WindowedOrder:
    """The order of one split."""

    shard_rows: Sequence[int]
    """Rows of each shard."""
    shuffled_shards: int
    """Shards in a window."""
    seed: int

    def rows(self, positions: _Ints) -> _Ints:
        """Row at each position, int64 [N]; positions of an epoch are a permutation of all rows."""
        out = np.empty(len(positions), dtype=np.int64)
        epochs, index = np.divmod(positions, self._num_rows)
        first_row = np.cumsum([0, *self.shard_rows], dtype=np.int64)
        for epoch in np.unique(epochs):
            order, starts = self._windows(int(epoch))
            window_of = np.searchsorted(starts, index, side="right") - 1
            for window in np.unique(window_of[epochs == epoch]):
                chosen = (epochs == epoch) & (window_of == window)
                shards = self._shards_of(order, int(window))
                ends = np.cumsum([self.shard_rows[shard] for shard in shards], dtype=np.int64)
                size = int(ends[-1])
                # The number of the window over all epochs is its key.
                key = int(epoch) * self._num_windows + int(window)
                inside = shuffled_rows(index[chosen] - starts[window] + key * size, num_rows=size, seed=self.seed)
                place = np.searchsorted(ends, inside, side="right")
                offset = inside - np.concatenate([[0], ends])[place]
                out[chosen] = first_row[shards[place]] + offset
        return out

    def shards_near(self, position: int) -> tuple[list[int], list[int]]:
        """Shards of the window that holds `position`, and those of the window after it."""
        epoch, index = divmod(position, self._num_rows)
        order, starts = self._windows(epoch)
        window = int(np.searchsorted(starts, index, side="right")) - 1
        here = self._shards_of(order, window)
        if window + 1 < self._num_windows:
            after = self._shards_of(order, window + 1)
        else:
            after = self._shards_of(self._windows(epoch + 1)[0], 0)
        return here.tolist(), after.tolist()

    @property
    def _num_rows(self) -> int:
        return sum(self.shard_rows)

    @property
    def _num_windows(self) -> int:
        return -(-len(self.shard_rows) // self.shuffled_shards)

    def _shards_of(self, order: _Ints, window: int) -> _Ints:
        return order[window * self.shuffled_shards : (window + 1) * self.shuffled_shards]

    def _windows(self, epoch: int) -> tuple[_Ints, _Ints]:
        """Shards in the epoch's order, int64 [S], and the first index of each window."""
        count = len(self.shard_rows)
        order = shuffled_rows(
            np.arange(epoch * count, (epoch + 1) * count), num_rows=count, seed=self.seed + _SHARD_SEED
        )
        ends = np.cumsum(np.asarray(self.shard_rows, dtype=np.int64)[order])
        return order, np.concatenate([[0], ends[self.shuffled_shards - 1 : -1 : self.shuffled_shards]])
