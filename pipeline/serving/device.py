"""Where a replica computes and in which dtype, with the reason.

Owns the two `auto` choices of a deployment. The one decision: `auto` always records what it chose and why, and an
explicit wish that cannot be had is an error, never another device.
"""

from dataclasses import dataclass
from typing import Any

import jax

from pipeline.errors import ParameterError

_PLATFORM_OF_DEVICE = {"cpu": "cpu", "cuda": "gpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The chosen device and dtype."""

    device: str
    device_reason: str
    dtype: str
    dtype_reason: str


def choose_placement(*, device: str, dtype: str) -> tuple[Any, Placement]:
    """The jax device and what to record of the choice.

    Args:
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto`, `float32` or `bfloat16`.

    Raises:
        ParameterError: the device does not exist here.
    """
    found = jax.local_devices()
    platform = found[0].platform
    if device == "auto":
        name = "cpu" if platform == "cpu" else "cuda"
        reason = f"auto: jax sees {len(found)} {found[0].device_kind} device(s) first"
        chosen = found[0]
    else:
        matching = [one for one in found if one.platform == _PLATFORM_OF_DEVICE[device]]
        if not matching and device == "cpu":
            matching = jax.local_devices(backend="cpu")
        if not matching:
            raise ParameterError(
                f"device: {device} was asked for, but this replica's jax sees only {platform} ({found[0].device_kind})",
                hint="give the stage a GPU (resources: gpus) and install jax[cuda12], or use device: auto",
            )
        name, chosen, reason = device, matching[0], f"asked for; it is {matching[0].device_kind}"
    if dtype == "auto":
        on_cpu = name == "cpu"
        picked = "float32" if on_cpu else "bfloat16"
        dtype_reason = (
            "auto: bfloat16 products on XLA:CPU are 10 to 40 times slower than float32"
            if on_cpu
            else "auto: half the bytes of float32 at each decode step"
        )
    else:
        picked, dtype_reason = dtype, "asked for"
    return chosen, Placement(device=name, device_reason=reason, dtype=picked, dtype_reason=dtype_reason)
