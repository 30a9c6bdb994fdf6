"""What the arms of a trial did, counted where the requests pass.

Owns the counts, the latest times of each arm, and their Prometheus families. Knows nothing of HTTP. The one decision:
times are kept one by one, the latest few thousand, so that percentiles of several replicas together are exact.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.serving.traffic.traffic_comparison import Comparison
from pipeline.serving.traffic.traffic_conditions import ArmCount, CopyCount, Evidence

KEPT_TIMES = 4096
_BUCKETS_MS = (5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0)


class Arm(StrEnum):
    """Who answered."""

    CHAMPION = "champion"
    CHALLENGER = "challenger"


class Outcome(StrEnum):
    """How a request of an arm ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"
    """Status 400 to 499: the client's fault."""
    GONE = "gone"
    """The client went away; says nothing of the arm."""


@dataclass(slots=True)
class _Times:
    latest: "deque[float]" = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_MS) + 1))
    total_ms: float = 0.0

    def add(self, value: float) -> None:
        self.latest.append(value)
        self.buckets[next((i for i, limit in enumerate(_BUCKETS_MS) if value <= limit), len(_BUCKETS_MS))] += 1
        self.total_ms += value


@dataclass(slots=True)
class _Counted:
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    ttft: _Times = field(default_factory=_Times)
    latency: _Times = field(default_factory=_Times)


class Window:
    """Of one trial in one process. Thread-safe."""

    def __init__(self, *, counts_copies: bool) -> None:
        """`counts_copies` is True for a shadow trial."""
        self._lock = threading.Lock()
        self._arms = {arm: _Counted() for arm in Arm}
        self._copies = CopyCount() if counts_copies else None
        self._num_fallbacks = 0

    def record(self, arm: Arm, outcome: Outcome, *, ttft_ms: float, latency_ms: float) -> None:
        """Count a request that ended; its times count where it was answered."""
        with self._lock:
            counted = self._arms[arm]
            counted.outcomes[outcome] += 1
            if outcome is Outcome.ANSWERED:
                counted.ttft.add(ttft_ms)
                counted.latency.add(latency_ms)

    def fall_back(self) -> None:
        """Count a request that the champion answered because the challenger did not."""
        with self._lock:
            self._num_fallbacks += 1

    def drop(self) -> None:
        """Count a copy that found the queue full."""
        self._add_copies(dropped=1)

    def compared(self, found: Comparison) -> None:
        """Count what two answers have in common."""
        self._add_copies(
            equal=int(found.is_equal is True),
            different=int(found.is_equal is False),
            not_comparable=int(not found.is_comparable),
            cosines=found.cosines,
            max_abs_error=found.max_abs_error,
        )

    def evidence(self) -> Evidence:
        """Everything so far."""
        with self._lock:
            champion, challenger = (_arm_count(self._arms[arm]) for arm in (Arm.CHAMPION, Arm.CHALLENGER))
            return Evidence(champion=champion, challenger=challenger, copies=self._copies)

    def summary(self) -> dict[str, Any]:
        """Counts, as JSON."""
        with self._lock:
            arms = {
                arm.value: {outcome.value: count for outcome, count in counted.outcomes.items()}
                for arm, counted in self._arms.items()
            }
            copies = None if self._copies is None else asdict(self._copies)
            return {"arms": arms, "fallbacks": self._num_fallbacks, "copies": copies}

    def families(self) -> Iterator[Metric]:
        """For `/metrics`."""
        with self._lock:
            requests = CounterMetricFamily(
                "traffic_requests", "Requests of a trial by arm and outcome.", labels=("arm", "outcome")
            )
            for arm, counted in self._arms.items():
                for outcome, count in counted.outcomes.items():
                    requests.add_metric((arm.value, outcome.value), count)
            yield requests
            fallbacks = CounterMetricFamily("traffic_fallbacks", "Requests that the champion answered instead.")
            fallbacks.add_metric((), self._num_fallbacks)
            yield fallbacks
            yield self._histogram("ttft", "traffic_time_to_first_byte_seconds", "Arrival to first byte, by arm.")
            yield self._histogram("latency", "traffic_latency_seconds", "Arrival to last byte, by arm.")
            if self._copies is not None:
                yield from _copy_families(self._copies)

    def _histogram(self, what: str, name: str, text: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=("arm",))
        for arm, counted in self._arms.items():
            times: _Times = getattr(counted, what)
            running, buckets = 0, []
            limits = (*(f"{limit / 1000:g}" for limit in _BUCKETS_MS), "+Inf")
            for limit, count in zip(limits, times.buckets, strict=True):
                running += count
                buckets.append((limit, float(running)))
            family.add_metric((arm.value,), buckets, times.total_ms / 1000)
        return family

    def _add_copies(
        self,
        *,
        equal: int = 0,
        different: int = 0,
        not_comparable: int = 0,
        dropped: int = 0,
        cosines: Sequence[float] = (),
        max_abs_error: float | None = None,
    ) -> None:
        with self._lock:
            old = self._copies
            if old is None:
                return
            least = [value for value in (old.min_cosine, *cosines) if value is not None]
            largest = [value for value in (old.max_abs_error, max_abs_error) if value is not None]
            self._copies = CopyCount(
                equal=old.equal + equal,
                different=old.different + different,
                not_comparable=old.not_comparable + not_comparable,
                dropped=old.dropped + dropped,
                num_cosines=old.num_cosines + len(cosines),
                sum_cosines=old.sum_cosines + math.fsum(cosines),
                min_cosine=min(least, default=None),
                max_abs_error=max(largest, default=None),
            )


class _Families(Collector):
    def __init__(self, window: Window) -> None:
        self._window = window

    def collect(self) -> Iterator[Metric]:
        yield from self._window.families()


def render(window: Window | None) -> str:
    """Prometheus text format 0.0.4; empty without a trial."""
    if window is None:
        return ""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(window))
    return generate_latest(registry).decode()


def evidence_as_json(evidence: Evidence) -> dict[str, Any]:
    """What `read_evidence` reads again."""
    return asdict(evidence)


def read_evidence(given: Mapping[str, Any]) -> Evidence:
    """The evidence of another process."""
    copies = given.get("copies")
    return Evidence(
        champion=ArmCount(**given["champion"]),
        challenger=ArmCount(**given["challenger"]),
        copies=None if copies is None else CopyCount(**copies),
    )


def _arm_count(counted: _Counted) -> ArmCount:
    return ArmCount(
        answered=counted.outcomes[Outcome.ANSWERED],
        failed=counted.outcomes[Outcome.FAILED],
        refused=counted.outcomes[Outcome.REFUSED],
        ttft_ms=list(counted.ttft.latest),
        latency_ms=list(counted.latency.latest),
    )


def _copy_families(copies: CopyCount) -> Iterator[Metric]:
    results = CounterMetricFamily("traffic_copies", "Copies of a shadow trial by result.", labels=("result",))
    for name in ("equal", "different", "not_comparable", "dropped"):
        results.add_metric((name,), getattr(copies, name))
    yield results
