"""What a bench says: rows of ours against a peer, and the machine they ran on.

Owns the values that `pipeline bench` shows, logs and judges. Knows nothing of what is measured. The one decision: a row
without a measured peer never passes.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One comparison; larger is better."""

    name: str
    unit: str
    ours: float
    peer_name: str
    peer: float | None
    """None where the peer is not installed."""
    bar: float
    """Least ratio of ours to the peer."""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer."""
        return None if self.peer is None else self.ours / self.peer

    @property
    def ok(self) -> bool:
        """True where the ratio reaches the bar."""
        return self.ratio is not None and self.ratio >= self.bar


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """All rows of one bench."""

    machine: Mapping[str, Any]
    rows: tuple[BenchRow, ...]
    details: tuple[Mapping[str, str], ...] = ()
    """What the rows were counted from, one mapping of the same keys each; shown as a table of its own."""

    def to_json(self) -> dict[str, Any]:
        """`{"machine": ..., "rows": [{"name", "unit", "ours", "peer_name", "peer", "ratio", "bar", "ok"}]}`."""
        value: dict[str, Any] = {
            "machine": dict(self.machine),
            "rows": [
                {
                    "name": row.name,
                    "unit": row.unit,
                    "ours": row.ours,
                    "peer_name": row.peer_name,
                    "peer": row.peer,
                    "ratio": row.ratio,
                    "bar": row.bar,
                    "ok": row.ok,
                }
                for row in self.rows
            ],
        }
        if self.details:
            value["details"] = [dict(item) for item in self.details]
        return value


def machine_facts() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
