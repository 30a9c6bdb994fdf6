"""The function of ranks that does nothing, for the start of a gang.

Owns the mark that it leaves. Loads nothing but Ray Train: a worker imports the module of its function before it calls
it, and what that takes would be counted as start. The one decision: rank 0 alone leaves a mark.
"""

import time
from pathlib import Path
from typing import Any

from ray.train import get_context


def leave_mark(config: dict[str, Any]) -> None:
    """Say in the file `mark` when rank 0 got here, in seconds since the epoch."""
    if get_context().get_world_rank() == 0:
        Path(config["mark"]).write_text(str(time.time()))
