"""Which device trains, and how fast it could be.

Owns the choice between CPU and CUDA and the table of peak speeds. Knows nothing of models. The one decision: a choice
always comes with its reason, and a device that was asked for by name is never replaced by another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.errors import ParameterError

_PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    # Dense, without sparsity, from the vendor's data sheets. float32 is the plain CUDA-core rate because torch does
    # not use TF32 unless it is told to. float16 is as fast as bfloat16 on cards that have both. float8 has no row: only
    # products of blocks are in it, so a share of its peak would say little.
    "A100": {"float32": 19.5e12, "bfloat16": 312e12},
    "H100 PCIe": {"float32": 51e12, "bfloat16": 756e12},
    "H100 NVL": {"float32": 60e12, "bfloat16": 835e12},
    "H100": {"float32": 67e12, "bfloat16": 989e12},
    "H200": {"float32": 67e12, "bfloat16": 989e12},
    "B200": {"float32": 75e12, "bfloat16": 2250e12},
    "L40S": {"float32": 91.6e12, "bfloat16": 362e12},
    "L4": {"float32": 30.3e12, "bfloat16": 121e12},
    "A10G": {"float32": 35e12, "bfloat16": 70e12},
    "V100": {"float32": 15.7e12, "float16": 125e12},
    "T4": {"float32": 8.1e12, "float16": 65e12},
    "RTX 4090": {"float32": 82.6e12, "bfloat16": 165.2e12},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """The device of all ranks and why."""

    device: Literal["cpu", "cuda"]
    reason: str


def choose_device(
    asked: Literal["auto", "cpu", "cuda"], *, gpus_per_worker: float, available_gpus: float
) -> DeviceChoice:
    """Decide where to train.

    Args:
        asked: the flow's `device`.
        gpus_per_worker: what the stage's resources give each worker.
        available_gpus: GPUs that the cluster (or this machine) has.

    Raises:
        ParameterError: a GPU was asked for and there is none.
    """
    if asked == "cpu":
        return DeviceChoice(device="cpu", reason="the flow says device: cpu")
    if asked == "cuda" and gpus_per_worker <= 0:
        raise ParameterError(
            f"device: cuda, but no GPU is reserved for the workers ({available_gpus:g} available)",
            hint="set `resources: {gpus: 1}` on the stage, or `device: auto` to train on the CPU",
        )
    if gpus_per_worker > 0 and available_gpus <= 0:
        raise ParameterError(
            f"each worker wants {gpus_per_worker:g} GPU (device: {asked}), but no GPU is available",
            hint="run where there is a GPU, or set `device: cpu` and leave out `resources.gpus`",
        )
    if asked == "cuda":
        return DeviceChoice(device="cuda", reason="the flow says device: cuda")
    if gpus_per_worker > 0:
        return DeviceChoice(device="cuda", reason=f"auto: each worker has {gpus_per_worker:g} GPU")
    why = "no GPU is available" if available_gpus <= 0 else f"no GPU is reserved ({available_gpus:g} available)"
    return DeviceChoice(device="cpu", reason=f"auto: {why}")


def num_cuda_devices() -> int:
    """CUDA devices that torch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_device_present(device: Literal["cpu", "cuda"]) -> None:
    """Called in a rank: refuse to train on another device than the one that was chosen.

    Raises:
        ParameterError: CUDA was chosen and torch sees no device here.
    """
    if device == "cuda" and not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "no driver or no device"
        raise ParameterError(
            f"device: cuda, but torch sees no CUDA device in this worker ({why})",
            hint="install a CUDA build of torch on every node, or set `device: cpu`",
        )


def peak_flops(device_name: str, *, precision: str) -> float | None:
    """Peak FLOP/s of a GPU by its CUDA name, or None where it is not in the table (and for CPUs)."""
    for name in sorted(_PEAK_FLOPS, key=len, reverse=True):
        if name.lower() in device_name.lower():
            peaks = _PEAK_FLOPS[name]
            return peaks.get(precision, peaks.get("bfloat16") if precision == "float16" else None)
    return None
