"""Small things that are shown in several places: durations, numbers, tables.

Pure. The one decision: a terminal gets colour, a pipe gets the same words without it (rich decides by the stream).
"""

import json
import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.tracking.view import RunStatus, StageStatus

STYLES = {
    "DONE": "green",
    "REUSED": "cyan",
    "RUNNING": "yellow",
    "WAITING": "yellow",
    "FAILED": "red",
    "CRASHED": "red",
    "INTERRUPTED": "magenta",
    "SKIPPED": "dim",
    "PENDING": "dim",
}


def make_console(*, stderr: bool = False) -> Console:
    """A console that does not wrap when it is no terminal."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=200, soft_wrap=True)
    return console


def styled(status: RunStatus | StageStatus) -> str:
    """A status as rich markup."""
    return f"[{STYLES[status.value]}]{status.value}[/]"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def moment(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def number(value: float) -> str:
    """Integers with separators, the rest with four significant digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def byte_text(num_bytes: float) -> str:
    """`512 B`, `1.5 kB`, `538 MB`, `1.2 GB`; powers of a thousand, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def make_table(**options: Any) -> Table:
    """A table without lines, with dim titles."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", **options)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
