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
    """One comparison."""

    name: str
    unit: str
    ours: float | None
    """None where it could not be measured."""
    peer_name: str
    peer: float | None
    """None where the peer is not installed or could not be measured."""
    bar: float | None
    """Least ratio; None where the row is for information."""
    is_smaller_better: bool = False
    note: str = ""
    """Why a figure is missing."""

    @property
    def ratio(self) -> float | None:
        """How many times as good as the peer: ours over the peer, or the peer over ours where smaller is better."""
        if self.ours is None or self.peer is None:
            return None
        return self.peer / self.ours if self.is_smaller_better else self.ours / self.peer

    @property
    def ok(self) -> bool:
        """True where the ratio was measured and reaches the bar."""
        return self.ratio is not None and (self.bar is None or self.ratio >= self.bar)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """All rows of one bench."""

    machine: Mapping[str, Any]
    rows: tuple[BenchRow, ...]
    details: tuple[Mapping[str, str], ...] = ()
    """What the rows were counted from, one mapping of the same keys each; shown as a table of its own."""

    def to_json(self) -> dict[str, Any]:
        """`{"machine": ..., "rows": [{"name", "unit", "ours", "peer_name", "peer", "ratio", "bar", "ok", "note"}]}`."""
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
                    "note": row.note,
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
