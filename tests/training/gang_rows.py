"""Datasets whose reading fails or takes its time, for gangs on Ray; they travel there by value."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.data.packed import PackedDataset


class OnceFaultyRows:
    """Sends the process that reads certain steps a signal, each once; a mark in the file system remembers."""

    def __init__(self, path: Path, *, faults: Mapping[int, int], rank: int, marks: Path, seconds: float = 0.0) -> None:
        self._rows = PackedDataset.open(path, verify=False)
        self._faults = faults
        self._rank = rank
        self._marks = marks
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, **options: Any) -> Any:
        if step in self._faults and options["rank"] == self._rank:
            mark = self._marks / signal.Signals(self._faults[step]).name
            if not mark.exists():
                mark.write_text(str(os.getpid()), encoding="utf-8")
                os.kill(os.getpid(), self._faults[step])
        time.sleep(self._seconds)
        return self._rows.train_rows(step, **options)


class SlowRows:
    """Every step takes at least so long, so that a test can act in the middle of training, until `hurry` exists."""

    def __init__(self, path: Path, *, seconds: float, hurry: Path) -> None:
        self._rows = PackedDataset.open(path, verify=False)
        self._seconds = seconds
        self._hurry = hurry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, **options: Any) -> Any:
        if not self._hurry.exists():
            time.sleep(self._seconds)
        return self._rows.train_rows(step, **options)
