"""Numbers that say how far two models agree, and how well one predicts.

Owns the formulas. Numpy only; knows nothing of models, frameworks or files. The one decision: differences are taken in
float32 logits, everything that sums (KL, loss) in float64, so the metric adds no noise of its own.

Shape suffixes: B rows, T positions, V vocabulary, S sequences, N continued tokens.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

LARGEST_LOSS = 700.0
"""exp of it still is a float64; perplexity is capped there."""
HISTOGRAM_EDGES: Floats = np.concatenate([[0.0], np.logspace(-9, 3, 25)])
"""Edges of the histogram of absolute differences: one bin for what is below 1e-9, then two a decade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitComparison:
    """How candidate logits differ from reference logits, position by position."""

    max_abs_BT: Floats
    """`max_v |r - c|`."""
    max_rel_BT: Floats
    """`max_v |r - c| / max_v |r|`: relative to the largest logit of the position, because single logits cross zero."""
    kl_BT: Floats
    """`KL(softmax(r) || softmax(c))` in nats, float64, at least 0."""
    same_top1_BT: NDArray[np.bool_]
    """Both have their largest logit at the same token."""
    histogram: NDArray[np.int64]
    """Counts of `|r - c|` between `HISTOGRAM_EDGES`; above the last edge counts in the last bin."""


def compare_logits(reference_BTV: Floats, candidate_BTV: Floats) -> LogitComparison:
    """Compare float32 logits [B, T, V] of two models on the same tokens.

    Raises:
        ValueError: the shapes differ, or a logit is not finite; says whose and where.
    """
    if reference_BTV.shape != candidate_BTV.shape:
        raise ValueError(f"logits of shapes {reference_BTV.shape} and {candidate_BTV.shape} cannot be compared")
    for side, logits in (("reference", reference_BTV), ("candidate", candidate_BTV)):
        bad = np.argwhere(~np.isfinite(logits))
        if len(bad):
            row, position, token = bad[0]
            raise ValueError(
                f"{len(bad)} logits of the {side} are not finite, the first at row {row}, position {position}, "
                f"token {token}: {logits[row, position, token]}"
            )
    difference_BTV = np.abs(reference_BTV - candidate_BTV)
    max_abs_BT = difference_BTV.max(axis=-1)
    scale_BT = np.maximum(np.abs(reference_BTV).max(axis=-1), np.finfo(np.float32).tiny)
    counts, _ = np.histogram(np.minimum(difference_BTV, HISTOGRAM_EDGES[-1]), bins=HISTOGRAM_EDGES)
    return LogitComparison(
        max_abs_BT=max_abs_BT,
        max_rel_BT=max_abs_BT / scale_BT,
        kl_BT=kl_divergence(reference_BTV, candidate_BTV),
        same_top1_BT=reference_BTV.argmax(axis=-1) == candidate_BTV.argmax(axis=-1),
        histogram=counts.astype(np.int64),
    )


def log_softmax(logits_BTV: Floats) -> Floats:
    """Natural logarithm of the softmax over the last axis, in float64."""
    shifted = logits_BTV.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference_BTV: Floats, candidate_BTV: Floats) -> Floats:
    """`sum_v p_v (log p_v - log q_v)` with p of the reference, q of the candidate; [B, T], nats.

    Rounding in float64 can leave a value like -1e-17 for equal inputs; it is given as 0.
    """
    log_p, log_q = log_softmax(reference_BTV), log_softmax(candidate_BTV)
    return np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0)


def topk_overlap(reference: Floats, candidate: Floats, *, k: int) -> Floats:
    """Share of the `k` largest of the last axis that are among the other side's `k` largest; the leading shape."""
    theirs, ours = (np.argpartition(logits, -k, axis=-1)[..., -k:] for logits in (reference, candidate))
    return (theirs[..., :, None] == ours[..., None, :]).any(axis=-1).mean(axis=-1)


def matched_prefix(reference_SN: NDArray[Any], candidate_SN: NDArray[Any]) -> NDArray[np.int64]:
    """How many tokens of each continuation agree before the first that differs; [S].

    What follows a first difference was predicted from other text, so it counts as not matched.
    """
    return np.cumprod(reference_SN == candidate_SN, axis=1).sum(axis=1).astype(np.int64)


def token_losses(logits_BTV: Floats, targets_BT: NDArray[Any]) -> Floats:
    """`-log softmax(logits)[target]` in nats, float64 [B, T]."""
    return -np.take_along_axis(log_softmax(logits_BTV), targets_BT[..., None], axis=-1)[..., 0]


@dataclass(slots=True)
class LossTotals:
    """A mean over tokens, batch by batch: each token weighs the same whatever batch it came in."""

    num_tokens: int = 0
    _sums: list[float] = field(default_factory=list)

    def add(self, losses: Floats) -> None:
        """Take in the losses of any number of tokens, in nats."""
        self.num_tokens += losses.size
        self._sums.append(float(losses.sum(dtype=np.float64)))

    @property
    def loss(self) -> float:
        """Nats a token; NaN before the first token."""
        return math.fsum(self._sums) / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, at most exp(700)."""
        return math.exp(min(self.loss, LARGEST_LOSS))
