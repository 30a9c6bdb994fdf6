"""What a launcher tells training of the world outside: a gang that was lost, a machine that is taken away.

Owns the three calls. Imports no torch, for they run in the launcher's process too. The one decision: a launcher leaves
marks and requests; what follows from them is decided by the ranks.
"""

import contextlib
from collections.abc import Sequence

from pipeline.artifacts.store import open_store
from pipeline.errors import StoreError
from pipeline.training.faults.recovery import Outage, record_outage
from pipeline.training.faults.requests import Flag, ask, listen


def record(workspace: str, noticed_at: float, torn_down_at: float) -> None:
    """Write down the end of a gang; seconds since the epoch."""
    # Storage that is away is told by the next checkpoint; a mark that is missing only leaves a metric out.
    with contextlib.suppress(StoreError):
        record_outage(open_store(workspace), Outage(noticed_at=noticed_at, torn_down_at=torn_down_at))


def make_way(reason: str) -> None:
    """In a rank: commit at the next step boundary and end."""
    ask(Flag.PREEMPT, reason=reason)


def heed(signals: Sequence[str]) -> None:
    """In the main thread of a process that holds a rank all its life: let signals (`TERM`, ...) ask it."""
    listen(signals)
