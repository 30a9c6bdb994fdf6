"""What a trial measures, and the conditions that a flow sets on it.

Owns the names of the metrics and how each follows from what was counted. Pure. The one decision: a condition on
something that was not measured fails; a challenger is never promoted for lack of evidence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.errors import nearest_name
from pipeline.spec.gate import CONDITION_FORM, Gate

PERCENTILES = (50, 95, 99)
_OF_BOTH_MODES = {
    "error_rate": "share of the challenger's requests that failed (status 500 and above, broken off, too late), 0 to 1",
    **{f"p{p}_ttft_ms": f"milliseconds to the challenger's first byte, {p}th percentile" for p in PERCENTILES},
    **{f"p{p}_latency_ms": f"milliseconds to the challenger's last byte, {p}th percentile" for p in PERCENTILES},
    **{f"p{p}_ttft_ratio": f"p{p}_ttft_ms over the champion's" for p in PERCENTILES},
    **{f"p{p}_latency_ratio": f"p{p}_latency_ms over the champion's" for p in PERCENTILES},
}
CANARY_METRICS: Mapping[str, str] = _OF_BOTH_MODES
SHADOW_METRICS: Mapping[str, str] = {
    **_OF_BOTH_MODES,
    "agreement": "share of the compared greedy texts that are equal, 0 to 1",
    "min_cosine": "least cosine between the two embeddings of a text",
    "mean_cosine": "mean cosine between the two embeddings of a text",
    "max_abs_error": "largest difference between two numbers of a prediction",
    "dropped_rate": "share of the copies that were dropped because the challenger was too slow, 0 to 1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCount:
    """What one arm did in a trial."""

    answered: int = 0
    """Wholly, with a status below 400."""
    failed: int = 0
    refused: int = 0
    """The client's fault (status 400 to 499); judged by nothing."""
    ttft_ms: Sequence[float] = ()
    latency_ms: Sequence[float] = ()

    @property
    def judged(self) -> int:
        """Requests that say something about the arm."""
        return self.answered + self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyCount:
    """What came of the copies of a shadow trial."""

    equal: int = 0
    different: int = 0
    not_comparable: int = 0
    """Sampled texts, and answers of which one failed."""
    dropped: int = 0
    num_cosines: int = 0
    sum_cosines: float = 0.0
    min_cosine: float | None = None
    max_abs_error: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Of a trial so far, from all replicas."""

    champion: ArmCount = field(default_factory=ArmCount)
    challenger: ArmCount = field(default_factory=ArmCount)
    copies: CopyCount | None = None


def parse_conditions(given: Mapping[str, str], *, known: Mapping[str, str]) -> tuple[Gate, ...]:
    """The conditions of `until`, such as `{error_rate: "< 1%", p95_ttft_ms: "<= 300"}`.

    Raises:
        ValueError: names every metric that does not exist, with the nearest, and every condition of another form.
    """
    problems, gates = [], []
    for metric, condition in given.items():
        if metric not in known:
            near = nearest_name(metric, list(known))
            meant = f", did you mean {near}?" if near else ""
            problems.append(f"{metric}: no such metric{meant}; there are {', '.join(known)}")
            continue
        try:
            gates.append(Gate.parse(metric, condition))
        except ValueError:
            problems.append(f"{metric}: {condition!r} is not {CONDITION_FORM}")
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(gates)


def measured(evidence: Evidence) -> dict[str, float]:
    """Every metric that the evidence gives."""
    champion, challenger = evidence.champion, evidence.challenger
    found: dict[str, float] = {}
    if challenger.judged:
        found["error_rate"] = challenger.failed / challenger.judged
    for what in ("ttft", "latency"):
        ours, theirs = getattr(challenger, f"{what}_ms"), getattr(champion, f"{what}_ms")
        for p in PERCENTILES:
            if ours:
                found[f"p{p}_{what}_ms"] = percentile(ours, p)
            if ours and theirs and percentile(theirs, p) > 0:
                found[f"p{p}_{what}_ratio"] = percentile(ours, p) / percentile(theirs, p)
    if evidence.copies is not None:
        found.update(_of_copies(evidence.copies, judged=challenger.judged))
    return found


def percentile(values: Sequence[float], p: float) -> float:
    """By nearest rank: the least value that `p` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)]


def merged(parts: Sequence[Evidence]) -> Evidence:
    """The evidence of several replicas together."""
    copies = [part.copies for part in parts if part.copies is not None]
    return Evidence(
        champion=_merged_arm([part.champion for part in parts]),
        challenger=_merged_arm([part.challenger for part in parts]),
        copies=_merged_copies(copies) if copies else None,
    )


def _of_copies(copies: CopyCount, *, judged: int) -> dict[str, float]:
    found: dict[str, float] = {}
    if copies.equal + copies.different:
        found["agreement"] = copies.equal / (copies.equal + copies.different)
    if copies.num_cosines and copies.min_cosine is not None:
        found["min_cosine"] = copies.min_cosine
        found["mean_cosine"] = copies.sum_cosines / copies.num_cosines
    if copies.max_abs_error is not None:
        found["max_abs_error"] = copies.max_abs_error
    if judged + copies.dropped:
        found["dropped_rate"] = copies.dropped / (judged + copies.dropped)
    return found


def _merged_arm(arms: Sequence[ArmCount]) -> ArmCount:
    return ArmCount(
        answered=sum(arm.answered for arm in arms),
        failed=sum(arm.failed for arm in arms),
        refused=sum(arm.refused for arm in arms),
        ttft_ms=[value for arm in arms for value in arm.ttft_ms],
        latency_ms=[value for arm in arms for value in arm.latency_ms],
    )


def _merged_copies(parts: Sequence[CopyCount]) -> CopyCount:
    least = [part.min_cosine for part in parts if part.min_cosine is not None]
    largest = [part.max_abs_error for part in parts if part.max_abs_error is not None]
    return CopyCount(
        equal=sum(part.equal for part in parts),
        different=sum(part.different for part in parts),
        not_comparable=sum(part.not_comparable for part in parts),
        dropped=sum(part.dropped for part in parts),
        num_cosines=sum(part.num_cosines for part in parts),
        sum_cosines=math.fsum(part.sum_cosines for part in parts),
        min_cosine=min(least, default=None),
        max_abs_error=max(largest, default=None),
    )
