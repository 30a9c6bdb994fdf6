"""How well a model predicts held-out rows.

Owns the loop over batches and the means by row and by position. Knows nothing of frameworks, datasets or stages. The
one decision: the overall loss is a mean over tokens, never a mean of batch means, so the batch size cannot change it.

Shape suffixes: B rows, T positions (T + 1 ids a row), N all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import LossTotals


class Scorer(Protocol):
    """A model that gives the loss of each next token."""

    def token_losses(self, rows_BT: NDArray[Any]) -> NDArray[Any]:
        """Nats, float32 [B, T], of int32 rows [B, T + 1]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What was found."""

    totals: LossTotals
    loss_by_row: tuple[float, ...]
    """Mean nats a token of each row, in the given order."""
    loss_by_position: tuple[float, ...]
    """Mean nats at each position."""


def score(
    scorer: Scorer,
    *,
    read: Callable[[NDArray[np.int64]], NDArray[Any]],
    rows: NDArray[np.int64],
    batch_sequences: int,
    progress: Callable[[int, float], None] | None = None,
) -> Scores:
    """Score rows batch by batch.

    Args:
        scorer: the model.
        read: gives int32 [B, T + 1] for row indices [B].
        rows: which rows, [N], at least one.
        batch_sequences: rows read and scored at a time.
        progress: told rows done and the loss so far.
    """
    totals = LossTotals()
    by_row: list[float] = []
    by_position_T: Any = 0.0
    for start in range(0, len(rows), batch_sequences):
        losses_BT = scorer.token_losses(read(rows[start : start + batch_sequences])).astype(np.float64)
        totals.add(losses_BT)
        by_row += [float(loss) for loss in losses_BT.mean(axis=1)]
        by_position_T = by_position_T + losses_BT.sum(axis=0)
        if progress is not None:
            progress(len(by_row), totals.loss)
    return Scores(
        totals=totals,
        loss_by_row=tuple(by_row),
        loss_by_position=tuple(float(loss) for loss in by_position_T / len(rows)),
    )
