"""How fast steps are.

Owns step durations and what is derived from them. Knows nothing of what a step does. The one decision: only time inside
steps counts; validation, checkpoints and the first step of a process (allocation, compilation) do not.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipeline.training.config import Precision
from pipeline.training.device import peak_flops
from pipeline.training.worker import WorkerContext


def peak_flops_of(worker: WorkerContext, *, precision: Precision) -> float | None:
    """Peak FLOP/s of one rank's device, or None where it is unknown (every CPU)."""
    if worker.device != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(worker.torch_device), precision=precision)


@dataclass(kw_only=True)
class Speedometer:
    """Durations of steps, of the whole run and since the last reading."""

    units_per_step: int
    """Tokens, or examples."""
    flops_per_unit: float | None
    peak_flops: float | None
    """Of all ranks together."""
    _seconds: list[float] = field(default_factory=list)
    _window: list[float] = field(default_factory=list)
    _started: float = 0.0
    _waits: list[float] = field(default_factory=list)

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The step is done."""
        elapsed = time.perf_counter() - self._started
        self._seconds.append(elapsed)
        self._window.append(elapsed)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a step waits for its rows."""
        started = time.perf_counter()
        yield
        self._waits.append(time.perf_counter() - started)

    def read_waits(self) -> float:
        """Seconds that a step waited for its rows, mean since the last reading."""
        waits, self._waits = self._waits, []
        return statistics.fmean(waits) if waits else 0.0

    def read_window(self) -> float:
        """Units per second of all ranks since the last reading."""
        window, self._window = self._window, []
        return self.units_per_step * len(window) / sum(window) if window else 0.0

    def steady(self) -> float:
        """Units per second of all ranks by the median step, without the first; 0 where no step ran."""
        counted = self._seconds[1:] or self._seconds
        return self.units_per_step / statistics.median(counted) if counted else 0.0

    def mfu(self, units_per_second: float) -> float | None:
        """Model FLOPs utilization, from 0 to 1, or None where the peak or the model's FLOPs are unknown."""
        if self.peak_flops is None or self.flops_per_unit is None:
            return None
        return units_per_second * self.flops_per_unit / self.peak_flops
