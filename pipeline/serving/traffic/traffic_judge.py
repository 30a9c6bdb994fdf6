"""Whether a challenger takes over.

Owns the verdict. Pure: time and evidence are given. The one decision: a challenger takes over when enough requests were
judged and every condition holds; it goes as soon as it cannot win any more, and when the time is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.serving.traffic.traffic_conditions import Evidence, measured
from pipeline.spec.gate import Gate, GateVerdict


class Verdict(StrEnum):
    """What to do now."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Of a trial."""

    conditions: Sequence[Gate]
    min_requests: int
    """That the challenger has answered or failed before it is judged."""
    window_seconds: float
    """After which a trial without a verdict is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict, and why."""

    verdict: Verdict
    reason: str
    gates: tuple[GateVerdict, ...] = ()


def judge(evidence: Evidence, *, rules: Rules, elapsed_seconds: float) -> Judgement:
    """Hold the evidence against the rules."""
    count = evidence.challenger.judged
    metrics = measured(evidence)
    gates = tuple(condition.judge(metrics) for condition in rules.conditions)
    if count >= rules.min_requests:
        failing = [str(gate) for gate in gates if not gate.holds]
        if failing:
            return Judgement(
                verdict=Verdict.ROLLBACK, reason=f"after {count} requests: {'; '.join(failing)}", gates=gates
            )
        held = "; ".join(map(str, gates)) or "no condition was set"
        return Judgement(verdict=Verdict.PROMOTE, reason=f"after {count} requests: {held}", gates=gates)
    lost = _why_lost(evidence, rules)
    if lost is not None:
        return Judgement(verdict=Verdict.ROLLBACK, reason=lost, gates=gates)
    if elapsed_seconds >= rules.window_seconds:
        return Judgement(verdict=Verdict.ROLLBACK, reason=_why_too_few(evidence, rules), gates=gates)
    return Judgement(verdict=Verdict.WAIT, reason=f"{count} of {rules.min_requests} requests", gates=gates)


def _why_lost(evidence: Evidence, rules: Rules) -> str | None:
    """The reason where even a perfect rest would break a condition on the error rate."""
    challenger = evidence.challenger
    at_best = {"error_rate": challenger.failed / max(rules.min_requests, challenger.judged, 1)}
    for condition in rules.conditions:
        verdict = condition.judge(at_best)
        if condition.metric == "error_rate" and condition.comparison in ("<", "<=") and not verdict.holds:
            return (
                f"{challenger.failed} of {challenger.judged} requests failed; even if the rest of {rules.min_requests} "
                f"succeed, {verdict}"
            )
    return None


def _why_too_few(evidence: Evidence, rules: Rules) -> str:
    count, others = evidence.challenger.judged, evidence.champion.judged
    if not count and not others:
        return f"no request came within {rules.window_seconds:g} s, so nothing is known of the challenger"
    return (
        f"the challenger had {count} requests within {rules.window_seconds:g} s (the champion {others}); "
        f"{rules.min_requests} are needed"
    )
