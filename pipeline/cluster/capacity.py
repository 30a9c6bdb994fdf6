"""What a cluster has, and whether a flow's stages can ever fit into it.

Pure, but for `planned_capacity`, which counts this machine's cores and GPUs without loading a framework. The one
decision: a request that no state of the cluster can satisfy is refused before anything starts; waiting for it would
never end.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Totals over all nodes. `source` says where the numbers come from."""

    cpus: float
    gpus: float
    memory_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one stage needs at once."""

    stage: str
    cpus: float
    gpus: float
    memory_bytes: int

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPUs"]
        if self.gpus:
            parts.append(f"{self.gpus:g} GPUs")
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.1f} GiB")
        return ", ".join(parts)


def planned_capacity() -> Capacity:
    """This machine, as a local head would offer it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    else:
        num_gpus = len(list(_NVIDIA_DEVICES.iterdir())) if _NVIDIA_DEVICES.is_dir() else 0
    return Capacity(
        cpus=float(len(os.sched_getaffinity(0))),
        gpus=float(num_gpus),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        source="this machine",
    )


def why_infeasible(demands: Sequence[Demand], capacity: Capacity) -> list[str]:
    """One line for each stage that can never run, naming the resource, what is asked and what there is."""
    lines: list[str] = []
    for demand in demands:
        lines.extend(
            f"stage {demand.stage!r} asks for {asked:g} {name} at once; {capacity.source} has {there:g}"
            for name, asked, there in (
                ("CPUs", demand.cpus, capacity.cpus),
                ("GPUs", demand.gpus, capacity.gpus),
            )
            if asked > there
        )
        if demand.memory_bytes > capacity.memory_bytes:
            lines.append(
                f"stage {demand.stage!r} asks for {demand.memory_bytes / 2**30:.1f} GiB at once; {capacity.source} has "
                f"{capacity.memory_bytes / 2**30:.1f} GiB"
            )
    return lines
