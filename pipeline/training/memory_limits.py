"""How much memory a rank may take, and who takes from the same.

Owns the limits of a host, a process and a GPU. Knows nothing of models. The one decision: a limit has a key, and ranks
that found the same key share it, so nothing has to be known of how ranks were dealt to hosts, containers or devices.

psutil tells the memory of the machine and nothing of control groups, so those are read here, of both versions. A limit
counts wherever it stands above the process: a scheduler sets it on a job, and ranks are in groups below that.
"""

import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

Place = Literal["host", "device"]
_GROUPS = {"v1": (Path("sys/fs/cgroup/memory"), "memory.limit_in_bytes"), "v2": (Path("sys/fs/cgroup"), "memory.max")}
"""Where each version's tree hangs, and the file of a group that holds its limit."""
_OF_A_PROCESS = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Bytes that all who find this limit may hold together."""

    place: Place
    name: str
    """In words."""
    key: str
    """Equal in all processes that it is one limit for; empty where it is of this process alone."""
    total_bytes: int
    free_bytes: int | None = None
    """Of a GPU, which others may hold memory of; None where what others hold is dropped or moved by the system."""


def host_limits(*, root: Path = Path("/")) -> list[MemoryLimit]:
    """The machine's memory, the control groups that this process is in, and its own limits.

    Args:
        root: of the file system.
    """
    host = socket.gethostname()
    machine = _text(root / "proc/sys/kernel/random/boot_id") or host
    limits = [
        MemoryLimit(place="host", name=f"the memory of {host}", key=machine, total_bytes=psutil.virtual_memory().total)
    ]
    for file in _group_files(root):
        limit = _text(file)
        if limit.isdigit():  # "max" is none; version 1 says a number above any memory
            # The number of a group's directory is the group's own, under whatever path a container sees it.
            key = f"{machine}/{file.parent.stat().st_ino}"
            limits.append(MemoryLimit(place="host", name=f"{file} on {host}", key=key, total_bytes=int(limit)))
    for name, number in _OF_A_PROCESS.items():
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(place="host", name=f"{name} of the process", key="", total_bytes=soft))
    return limits


def device_limits(device: torch.device) -> list[MemoryLimit]:
    """The memory of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    name = f"{properties.name} {device.index} of {socket.gethostname()}"
    return [MemoryLimit(place="device", name=name, key=str(properties.uuid), total_bytes=total, free_bytes=free)]


def least_of_each(limits: Sequence[MemoryLimit], *, num_ranks: int) -> int:
    """Bytes that each of so many ranks may hold, if all were where this process is."""
    return min(limit.total_bytes // (num_ranks if limit.key else 1) for limit in limits)


def _group_files(root: Path) -> Iterator[Path]:
    """Limits of the groups that this process is in, from its own up to the topmost that is seen here."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, name = _GROUPS["v1" if controllers else "v2"]
        top = root / tree
        group = top / path.lstrip("/")
        # A container that has no name space of its own reads a path here that it does not see.
        for directory in (group, *group.parents):
            if (directory / name).is_file():
                yield directory / name
            if directory == top:
                break


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
