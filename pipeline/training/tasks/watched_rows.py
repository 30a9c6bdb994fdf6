"""A dataset that writes down which rows each rank was given, and can end the process that asks for a step.

Owns the log of row digests and the kill. Knows nothing of models. The one decision: it stands where the dataset stands,
so that what is watched is the loop as it is.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOG_PATTERN = "rows-*.jsonl"
RowLog = Mapping[int, Sequence[Sequence[str]]]
"""Step to the row digests of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """SIGKILL to rank `rank` when it asks for the rows of step `step` (from 0)."""

    step: int
    rank: int


class WatchedRows:
    """Any dataset of training, watched."""

    def __init__(self, open_dataset: Callable[[], Any], *, log_directory: Path, kill: Kill | None = None) -> None:
        self._rows = open_dataset()
        self._log_directory = log_directory
        self._kill = kill
        log_directory.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, *, rows_per_step: int, rank: int, world_size: int, seed: int) -> Any:
        """What the dataset gives; its digests are in the log before it is given."""
        if self._kill is not None and (self._kill.step, self._kill.rank) == (step, rank):
            os.kill(os.getpid(), signal.SIGKILL)
        given = self._rows.train_rows(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size, seed=seed)
        line = json.dumps({"step": step, "rows": digests_of(given)})
        with (self._log_directory / f"rows-{rank:05d}.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        return given


def digests_of(rows: Any) -> list[str]:
    """One digest a row: of its tokens, or of its arrays in the order of their names."""
    arrays = [rows[name] for name in sorted(rows)] if isinstance(rows, Mapping) else [rows]
    return [
        hashlib.sha256(b"".join(np.ascontiguousarray(array[index]).tobytes() for array in arrays)).hexdigest()
        for index in range(len(arrays[0]))
    ]


def read_rows(log_directory: Path) -> RowLog:
    """What each rank was last given at each step."""
    steps: dict[int, dict[str, list[str]]] = {}
    for path in sorted(log_directory.glob(LOG_PATTERN)):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.stem] = entry["rows"]
    return {step: [by_rank[name] for name in sorted(by_rank)] for step, by_rank in sorted(steps.items())}
