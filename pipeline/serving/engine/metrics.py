"""Counters, gauges and histograms of one replica, as Prometheus text.

Owns the metric names (those that dashboards of language model servers expect, and our own) and their rendering. The one
decision: a name exists only in the table below; observing another is a KeyError in a test, not a new time series.
"""

import bisect
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens processed.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the cache.",
    "prefix_cache_hits_total": "Prompt tokens found there, and not computed again.",
    "generation_tokens_total": "Tokens generated.",
    "request_success_total": "Finished requests by finished_reason.",
    "aborted_requests_total": "Requests that ended early, by reason.",
    "rejected_requests_total": "Requests refused before they started, by status.",
    "compile_events_total": "XLA compiles by phase (warmup, serving); serving should stay 0.",
    "padding_tokens_total": "Token positions computed for padding.",
    "engine_steps_total": "Engine steps by kind (prefill, decode, shared).",
    "batches_total": "Forward passes over a batch of rows.",
    "rows_total": "Rows (examples, texts) computed.",
}
GAUGES: Mapping[str, str] = {
    "num_requests_running": "Requests in a slot.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage_perc": "Share of cache positions in use, 0 to 1.",
}
HISTOGRAMS: Mapping[str, str] = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Time per token after the first.",
    "e2e_request_latency_seconds": "Arrival to last token.",
    "request_queue_time_seconds": "Arrival to slot.",
    "request_prefill_time_seconds": "Slot to first token.",
    "request_decode_time_seconds": "First to last token.",
}


@dataclass(slots=True)
class _Histogram:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total: float = 0.0
    count: int = 0


class Metrics:
    """Thread-safe."""

    def __init__(self, *, model: str, names: Collection[str] | None = None) -> None:
        """Of one model, or of a process where `model` is empty; `names` are those it has, else all."""
        self.model = model
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._histograms = {name: _Histogram() for name in HISTOGRAMS if names is None or name in names}
        for name in (*COUNTERS, *GAUGES):
            if names is not None and name not in names:
                continue
            if name not in _LABEL_VALUES:
                self._values[name, ""] = 0.0
            for value in _LABEL_VALUES.get(name, ("", ()))[1]:
                self._values[name, value] = 0.0

    def count(self, name: str, amount: float = 1.0, *, label: str = "") -> None:
        """Add to a counter."""
        COUNTERS[name]
        with self._lock:
            self._values[name, label] = self._values.get((name, label), 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        GAUGES[name]
        with self._lock:
            self._values[name, ""] = value

    def observe(self, name: str, seconds: float, *, times: int = 1) -> None:
        """Add to a histogram, `times` times the same value."""
        histogram = self._histograms[name]
        index = bisect.bisect_left(_SECONDS, seconds)
        with self._lock:
            histogram.buckets[index] += times
            histogram.total += seconds * times
            histogram.count += times

    def value(self, name: str, *, label: str = "") -> float:
        """A counter's or gauge's value now."""
        with self._lock:
            return self._values.get((name, label), 0.0)

    def snapshot(self) -> "Snapshot":
        """Everything as it is at one moment."""
        with self._lock:
            return Snapshot(
                model=self.model,
                values=dict(self._values),
                histograms={
                    name: (tuple(held.buckets), held.total, held.count) for name, held in self._histograms.items()
                },
            )

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        return render([self])


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Metrics of one model at one moment."""

    model: str
    values: Mapping[tuple[str, str], float]
    """By name and label value."""
    histograms: Mapping[str, tuple[tuple[int, ...], float, int]]
    """Counts of each bucket, sum and count."""


def render(models: Iterable[Metrics]) -> str:
    """Prometheus text format 0.0.4 of several models: each name once, with a sample for each model."""
    snapshots = [metrics.snapshot() for metrics in models]
    lines: list[str] = []
    for table, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name, text in table.items():
            samples = [line for snapshot in snapshots for line in _samples(snapshot, name)]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
    return "\n".join(lines) + "\n"


def _samples(snapshot: Snapshot, name: str) -> Iterable[str]:
    label = _LABEL_VALUES.get(name, ("", ()))[0]
    for (found, value), amount in sorted(snapshot.values.items()):
        if found == name:
            yield f"{name}{_labels(snapshot, **({label: value} if label else {}))} {amount:.15g}"
    if name in snapshot.histograms:
        buckets, total, count = snapshot.histograms[name]
        running = 0
        for limit, amount in zip((*(f"{second:g}" for second in _SECONDS), "+Inf"), buckets, strict=True):
            running += amount
            yield f"{name}_bucket{_labels(snapshot, le=limit)} {running}"
        yield f"{name}_sum{_labels(snapshot)} {total:.9g}"
        yield f"{name}_count{_labels(snapshot)} {count}"


def _labels(snapshot: Snapshot, **more: str) -> str:
    pairs = {"model_name": snapshot.model, **more}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_LABEL_VALUES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "request_success_total": ("finished_reason", ("stop", "length")),
    "aborted_requests_total": ("reason", ("client", "error", "shutdown")),
    "rejected_requests_total": ("status", ()),
    "compile_events_total": ("phase", ("warmup", "serving")),
    "engine_steps_total": ("kind", ("prefill", "decode", "shared")),
}
"""Label name, and the values that are shown as 0 before they first occur."""
