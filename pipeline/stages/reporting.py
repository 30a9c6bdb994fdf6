"""A reporter that keeps what it is told until somebody drains it.

Owns the buffer between a stage's code and whoever carries reports to the driver. The one decision: reporting appends
to a list under a lock and can therefore neither block nor fail a stage.
"""

import threading
import time
from collections.abc import Mapping, Sequence

from pipeline.stages.protocol import JSON, Report


class BufferedReporter:
    """The `Reporter` of worker processes and of tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Report] = []

    def drain(self) -> list[Report]:
        """Take everything reported since the last call."""
        with self._lock:
            taken, self._pending = self._pending, []
        return taken

    def push(self, reports: Sequence[Report]) -> None:
        """Take over reports made in another process, as they are."""
        with self._lock:
            self._pending.extend(reports)

    def _add(self, kind: str, payload: Mapping[str, JSON], *, step: int | None = None) -> None:
        self.push([Report(kind=kind, payload=payload, time=time.time(), step=step)])

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Payload: the values by name."""
        self._add("metrics", {name: float(value) for name, value in values.items()}, step=step)

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        """Payload: `done`, `total`, `unit`, `note`."""
        self._add("progress", {"done": done, "total": total, "unit": unit, "note": note})

    def note(self, text: str) -> None:
        """Payload: `text`."""
        self._add("note", {"text": text})

    def figure(self, name: str, *, chart: Mapping[str, JSON]) -> None:
        """Payload: `name`, `chart`."""
        self._add("figure", {"name": name, "chart": dict(chart)})

    def dataset(self, name: str, *, digest: str, source: str, facts: Mapping[str, JSON]) -> None:
        """Payload: `name`, `digest`, `source`, `facts`."""
        self._add("dataset", {"name": name, "digest": digest, "source": source, "facts": dict(facts)})
