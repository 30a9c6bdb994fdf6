"""How fast a device reads its memory, and how many tokens a second that allows.

Owns the measurement, the file that remembers it, and the refusal of what would be absurdly slow. Knows nothing of
requests. The one decision: decoding reads every weight once a step, so bandwidth over bytes is a bound that is known
before anything is loaded, and waiting ten minutes to find out is what the refusal spares.
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pipeline.errors import ParameterError
from pipeline.serving.accelerator.device import allocator_room
from pipeline.serving.accelerator.records import read_record, write_record

FILE = "memory-bandwidth.json"
MEASURE_SECONDS = 0.2
_ROWS = {"cpu": 8192, "gpu": 65536}
_COLUMNS = 4096
"""With the rows: 128 MiB on a CPU, 1 GiB on a GPU; no cache holds it."""
SLOW_TOKENS_PER_SECOND = 5.0
"""Below it a person reads faster; said, not refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The most that memory allows one request."""

    per_second: float
    """Tokens of a decoder, forward passes of another model."""
    unit: str
    reason: str
    """The arithmetic."""


def bandwidth_of(device: Any, *, directory: Path | None, again: bool = False) -> float:
    """Bytes a second that a product with one row reads from `device`; measured once, then read from `directory`.

    `again` measures once more and keeps the larger figure: a busy machine reads slowly.
    """
    key = f"{device.device_kind}, {platform.node()}, jaxlib {jaxlib.__version__}, {len(os.sched_getaffinity(0))} cores"
    path = None if directory is None else directory / FILE
    known: dict[str, float] = read_record(path)
    if key in known and not again:
        return known[key]
    measured = max(_measured(device), known.get(key, 0.0))
    if path is not None:
        write_record(path, {**known, key: measured})
    return measured


def speed_of(num_bytes: int, *, bandwidth: float, unit: str = "tokens") -> Speed:
    """The bound for `num_bytes` of weights that each step reads."""
    per_second = bandwidth / max(1, num_bytes)
    return Speed(
        per_second=per_second,
        unit=unit,
        reason=f"{bandwidth / 1e9:.1f} GB/s of memory bandwidth / {num_bytes / 1e9:.3f} GB of weights read for each of "
        f"the {unit} = {per_second:.3g} {unit} a second",
    )


def check_speed(speed: Speed, *, floor: float) -> tuple[str, ...]:
    """Warnings about a slow model.

    Args:
        speed: the bound.
        floor: `min_tokens_per_second` of the flow.

    Raises:
        ParameterError: the bound is below the floor.
    """
    if speed.per_second < floor:
        raise ParameterError(
            f"the model would run absurdly slowly here: {speed.reason}; min_tokens_per_second is {floor:g}",
            hint="use a smaller dtype (bfloat16, int8), a GPU, a smaller model, or lower min_tokens_per_second",
        )
    if speed.per_second < SLOW_TOKENS_PER_SECOND:
        return (f"slow: {speed.reason}",)
    return ()


def _measured(device: Any) -> float:
    rows = _ROWS.get(device.platform, _ROWS["gpu"])
    room = allocator_room(device)
    if room is not None:  # a small share must not run out of memory for a measurement
        rows = min(rows, max(1024, room // 4 // (4 * _COLUMNS)))
    weight, x = jax.device_put((jnp.ones((rows, _COLUMNS)), jnp.ones((1, rows))), device)
    product = jax.jit(jnp.matmul).lower(x, weight).compile()
    jax.block_until_ready(product(x, weight))
    best = float("inf")
    started = time.perf_counter()
    while time.perf_counter() - started < MEASURE_SECONDS:
        began = time.perf_counter()
        jax.block_until_ready(product(x, weight))
        best = min(best, time.perf_counter() - began)
    return float(weight.nbytes / best)
