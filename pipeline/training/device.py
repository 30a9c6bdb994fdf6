"""Which device trains, and how fast it could be.

Owns the choice between CPU and CUDA and the table of peak speeds. Knows nothing of models. The one decision: a choice
always comes with its reason, and a device that was asked for by name is never replaced by another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.errors import ParameterError

Precision = Literal["float32", "bfloat16"]

_PEAK_FLOPS: Mapping[str, Mapping[Precision, float]] = {
    # Dense, without sparsity, from the vendor's data sheets. float32 is the plain CUDA-core rate because torch does
    # not use TF32 unless it is told to.
    "A100": {"float32": 19.5e12, "bfloat16": 312e12},
    "H100 PCIe": {"float32": 51e12, "bfloat16": 756e12},
    "H100 NVL": {"float32": 60e12, "bfloat16": 835e12},
    "H100": {"float32": 67e12, "bfloat16": 989e12},
    "H200": {"float32": 67e12, "bfloat16": 989e12},
    "B200": {"float32": 75e12, "bfloat16": 2250e12},
    "L40S": {"float32": 91.6e12, "bfloat16": 362e12},
    "L4": {"float32": 30.3e12, "bfloat16": 121e12},
    "A10G": {"float32": 35e12, "bfloat16": 70e12},
    "V100": {"float32": 15.7e12},
    "T4": {"float32": 8.1e12},
    "RTX 4090": {"float32": 82.6e12, "bfloat16": 165.2e12},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """The device of all ranks and why."""

    device: Literal["cpu", "cuda"]
    reason: str


def choose_device(
    asked: Literal["auto", "cpu", "cuda"], *, gpus_per_worker: float, visible_gpus: int | None = None
) -> DeviceChoice:
    """Decide where to train.

    Args:
        asked: the flow's `device`.
        gpus_per_worker: what the stage's resources give each worker.
        visible_gpus: CUDA devices that this process sees; asked of torch when None.

    Raises:
        ParameterError: `cuda` was asked for and there is none, or a GPU was reserved and torch sees none.
    """
    if asked == "cpu":
        return DeviceChoice(device="cpu", reason="the flow says device: cpu")
    seen = torch.cuda.device_count() if visible_gpus is None else visible_gpus
    if asked == "cuda":
        if gpus_per_worker <= 0:
            raise ParameterError(
                "device: cuda, but each worker has resources.gpus: 0",
                hint="set `resources: {gpus: 1}` on the stage, or `device: auto` to train on the CPU",
            )
        if seen == 0:
            raise ParameterError(
                "device: cuda, but no CUDA device is visible to torch "
                f"({'this build has no CUDA' if torch.version.cuda is None else 'no driver or no GPU'})",
                hint="run on a machine with a GPU, or set `device: auto` to train on the CPU",
            )
        return DeviceChoice(device="cuda", reason="the flow says device: cuda")
    if gpus_per_worker > 0 and seen > 0:
        return DeviceChoice(device="cuda", reason=f"auto: each worker has {gpus_per_worker:g} GPU and CUDA is there")
    if gpus_per_worker > 0:
        raise ParameterError(
            f"each worker has resources.gpus: {gpus_per_worker:g}, but no CUDA device is visible to torch",
            hint="install a CUDA build of torch, or leave out resources.gpus to train on the CPU",
        )
    why = "no CUDA device is visible" if seen == 0 else f"resources.gpus is 0 ({seen} CUDA devices stay unused)"
    return DeviceChoice(device="cpu", reason=f"auto: {why}")


def peak_flops(device_name: str, *, precision: Precision) -> float | None:
    """Peak FLOP/s of a GPU by its CUDA name, or None where it is not in the table (and for CPUs)."""
    for name in sorted(_PEAK_FLOPS, key=len, reverse=True):
        if name.lower() in device_name.lower():
            return _PEAK_FLOPS[name].get(precision)
    return None
