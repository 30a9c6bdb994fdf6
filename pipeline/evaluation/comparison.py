"""Two models on the same tokens: is the candidate the reference?

Owns what is asked of both and how the answers become numbers, pictures and a report. Knows nothing of frameworks,
checkpoints or stages. The one decision: logits are compared a few rows at a time and only summaries are kept, so memory
does not grow with the number of rows.

Shape suffixes: B rows, T positions, V vocabulary, P prompt tokens, N continued tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import HISTOGRAM_EDGES, LogitComparison, compare_logits, matched_prefix
from pipeline.evaluation.predictor import Predictor

SAMPLED_LOGITS = 600
"""Points in the scatter: enough to see a line, small enough for a page."""
LOGIT_BYTES_PER_BATCH = 64 * 2**20
"""Of one model; the float64 temporaries of KL take about eight times as much."""
_SAMPLE_SEED = 0

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceAgreement:
    """One held-out row."""

    row: int
    max_abs: float
    max_rel: float
    mean_kl: float
    max_kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """One prompt, continued by both."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    matched: int
    """Tokens that agree before the first that differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that was found."""

    sequences: tuple[SequenceAgreement, ...]
    continuations: tuple[Continuation, ...]
    histogram: tuple[int, ...]
    max_abs_by_position: tuple[float, ...]
    sample: tuple[tuple[float, float], ...]
    """(reference, candidate) logits, drawn evenly over rows, positions and tokens."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `evaluate.parity`; every row and position weighs the same."""
        rows = self.sequences
        continued = sum(len(continuation.reference) for continuation in self.continuations)
        return {
            "max_abs_logit_difference": max(row.max_abs for row in rows),
            "max_rel_logit_difference": max(row.max_rel for row in rows),
            "mean_kl": float(np.mean([row.mean_kl for row in rows])),
            "max_kl": max(row.max_kl for row in rows),
            "top1_agreement": float(np.mean([row.top1_agreement for row in rows])),
            "greedy_match": sum(continuation.matched for continuation in self.continuations) / continued,
        }


def compare(
    reference: Predictor,
    candidate: Predictor,
    *,
    tokens_BT: NDArray[Any],
    rows: NDArray[np.int64],
    prompts_BP: NDArray[Any],
    num_tokens: int,
    rows_per_batch: int,
    progress: Progress | None = None,
) -> Comparison:
    """Run both models and compare them.

    Args:
        reference: the model that is right by definition.
        candidate: the model that must agree.
        tokens_BT: int32, at least one row.
        rows: what to call each row in the report, [B].
        prompts_BP: int32, at least one prompt.
        num_tokens: tokens continued greedily, at least 1.
        rows_per_batch: rows compared at a time.
        progress: told after each batch and after the continuations.

    Raises:
        ValueError: a model gives logits of another shape than the other, or not finite ones.
    """
    starts = range(0, len(tokens_BT), rows_per_batch)
    total = len(starts) + 1
    rng = np.random.default_rng(_SAMPLE_SEED)
    found: list[LogitComparison] = []
    sample: list[tuple[float, float]] = []
    for done, start in enumerate(starts, start=1):
        batch_BT = tokens_BT[start : start + rows_per_batch]
        reference_BTV, candidate_BTV = reference.logits(batch_BT), candidate.logits(batch_BT)
        found.append(compare_logits(reference_BTV, candidate_BTV))
        drawn = rng.integers(0, reference_BTV.size, size=-(-SAMPLED_LOGITS // len(starts)))
        pairs = zip(reference_BTV.reshape(-1)[drawn], candidate_BTV.reshape(-1)[drawn], strict=True)
        sample += [(float(left), float(right)) for left, right in pairs]
        if progress is not None:
            progress(done, total, f"logits of {min(start + rows_per_batch, len(tokens_BT))} rows")
    continuations = _continuations(reference, candidate, prompts_BP=prompts_BP, num_tokens=num_tokens)
    if progress is not None:
        progress(total, total, f"{len(prompts_BP)} continuations")
    return Comparison(
        sequences=_sequences(found, rows),
        continuations=continuations,
        histogram=tuple(int(count) for count in np.sum([part.histogram for part in found], axis=0)),
        max_abs_by_position=tuple(
            float(value) for value in np.max([part.max_abs_BT.max(axis=0) for part in found], axis=0)
        ),
        sample=tuple(sample),
    )


def rows_per_batch(num_positions: int, *, vocabulary: int) -> int:
    """How many rows of logits fit the byte budget; at least one."""
    return max(1, LOGIT_BYTES_PER_BATCH // (4 * num_positions * vocabulary))


def charts(comparison: Comparison, *, reference: str, candidate: str) -> dict[str, Mapping[str, Any]]:
    """The pictures of a comparison, by name, as `Reporter.figure` takes them."""
    centres = np.concatenate([[HISTOGRAM_EDGES[1]], np.sqrt(HISTOGRAM_EDGES[1:-1] * HISTOGRAM_EDGES[2:])])
    filled = np.flatnonzero(comparison.histogram)
    drawn = slice(int(filled[0]), int(filled[-1]) + 1) if filled.size else slice(0)
    left, right = zip(*comparison.sample, strict=True)
    return {
        "logit_difference_histogram": _chart(
            "Absolute logit differences (the first bar: below 1e-9, zero included)",
            kind="bars",
            axes=("absolute difference", "logits"),
            x_scale="log",
            series=[("logits", [float(c) for c in centres[drawn]], list(comparison.histogram[drawn]))],
        ),
        "logit_scatter": _chart(
            f"{candidate} logits against {reference} logits ({len(left)} drawn)",
            kind="scatter",
            axes=(f"{reference} logit", f"{candidate} logit"),
            series=[("logits", list(left), list(right))],
        ),
        "difference_by_position": _chart(
            "Largest logit difference by position",
            kind="lines",
            axes=("position", "largest absolute difference"),
            series=[
                ("all rows", list(range(len(comparison.max_abs_by_position))), list(comparison.max_abs_by_position))
            ],
        ),
    }


def _chart(
    title: str,
    *,
    kind: str,
    axes: tuple[str, str],
    series: list[tuple[str, list[Any], list[Any]]],
    x_scale: str = "linear",
) -> dict[str, Any]:
    return {
        "title": title,
        "kind": kind,
        "x_label": axes[0],
        "y_label": axes[1],
        "x_scale": x_scale,
        "y_scale": "linear",
        "series": [{"name": name, "x": x, "y": y} for name, x, y in series],
    }


def _sequences(found: list[LogitComparison], rows: NDArray[np.int64]) -> tuple[SequenceAgreement, ...]:
    per_row = [
        (part.max_abs_BT[i], part.max_rel_BT[i], part.kl_BT[i], part.same_top1_BT[i])
        for part in found
        for i in range(len(part.max_abs_BT))
    ]
    return tuple(
        SequenceAgreement(
            row=int(row),
            max_abs=float(max_abs.max()),
            max_rel=float(max_rel.max()),
            mean_kl=float(kl.mean()),
            max_kl=float(kl.max()),
            top1_agreement=float(same.mean()),
        )
        for row, (max_abs, max_rel, kl, same) in zip(rows, per_row, strict=True)
    )


def _continuations(
    reference: Predictor, candidate: Predictor, *, prompts_BP: NDArray[Any], num_tokens: int
) -> tuple[Continuation, ...]:
    theirs_BN = reference.continue_greedily(prompts_BP, num_tokens=num_tokens)
    ours_BN = candidate.continue_greedily(prompts_BP, num_tokens=num_tokens)
    return tuple(
        Continuation(
            prompt=tuple(map(int, prompt)),
            reference=tuple(map(int, theirs)),
            candidate=tuple(map(int, ours)),
            matched=int(matched),
        )
        for prompt, theirs, ours, matched in zip(
            prompts_BP, theirs_BN, ours_BN, matched_prefix(theirs_BN, ours_BN), strict=True
        )
    )
