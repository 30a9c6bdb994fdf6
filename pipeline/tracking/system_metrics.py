"""What the driver's machine does while attempts run.

Owns the sampling of CPU, memory and GPUs. Knows nothing of MLflow but the names that its interface groups under
`system/`. The one decision: one thread samples once and tells every open attempt; MLflow's own monitor
would run a thread, and ask the server for the run's status at every sample, for each.
"""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable

import psutil

from pipeline.stages.protocol import Report

MEBIBYTE = 1024 * 1024
SMI_TIMEOUT_SECONDS = 5.0
CLOSE_SECONDS = SMI_TIMEOUT_SECONDS + 1.0  # a sample may be waiting for nvidia-smi
SMI_QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total,power.draw", "--format=csv,noheader,nounits")

Deliver = Callable[[str, str, int, tuple[Report, ...]], None]


class SystemSampler:
    """Samples while at least one attempt is watched.

    Args:
        deliver: `(run_id, stage, attempt, reports)`.
        interval_seconds: between two samples; 0 samples nothing.
    """

    def __init__(self, deliver: Deliver, *, interval_seconds: float) -> None:
        self._deliver = deliver
        self._interval_seconds = interval_seconds
        self._changed = threading.Condition()
        self._watched: dict[tuple[str, str, int], int] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, run_id: str, stage: str, attempt: int) -> None:
        """Sample for this attempt from now on."""
        with self._changed:
            if self._interval_seconds <= 0 or self._closed:
                return
            self._watched[run_id, stage, attempt] = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def unwatch(self, run_id: str, stage: str, attempt: int) -> None:
        """Stop sampling for this attempt."""
        with self._changed:
            self._watched.pop((run_id, stage, attempt), None)

    def close(self) -> None:
        """Stop the thread, and wait until it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call starts psutil's interval and means nothing
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._watched)
                self._changed.wait_for(lambda: self._closed, timeout=self._interval_seconds)
                if self._closed:
                    return
            values, now = sample(), time.time()
            with self._changed:
                steps = dict(self._watched)
                for key in steps:
                    self._watched[key] += 1
            for (run_id, stage, attempt), step in steps.items():
                report = Report(kind="metrics", payload=values, time=now, step=step)
                self._deliver(run_id, stage, attempt, (report,))


def sample() -> dict[str, float]:
    """One sample: utilizations in percent, memory in MiB, power in watts, named as MLflow names them."""
    memory = psutil.virtual_memory()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / MEBIBYTE,
        "system/system_memory_usage_percentage": memory.percent,
        **gpu_sample(),
    }


def gpu_sample() -> dict[str, float]:
    """GPU values by `nvidia-smi`; empty where there is none or it does not answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        answer = subprocess.run(
            [program, *SMI_QUERY], capture_output=True, text=True, timeout=SMI_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_smi(answer.stdout)


def parse_smi(text: str) -> dict[str, float]:
    """Metrics of one `nvidia-smi` answer, a line per GPU; values a GPU does not report (`[N/A]`) are left out."""
    values: dict[str, float] = {}
    for index, line in enumerate(text.strip().splitlines()):
        cells = [_number(cell) for cell in line.split(",")]
        if len(cells) != 4:
            continue
        utilization, used, total, power = cells
        named = {
            "utilization_percentage": utilization,
            "memory_usage_megabytes": used,
            "memory_usage_percentage": 100 * used / total if used is not None and total else None,
            "power_usage_watts": power,
        }
        values |= {f"system/gpu_{index}_{name}": value for name, value in named.items() if value is not None}
    return values


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
