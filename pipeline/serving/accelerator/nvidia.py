"""What the NVIDIA driver says of a device, without CUDA.

Owns one call of `nvidia-smi`, which every machine with the driver has. Loads no framework. The one decision: it is a
process of its own, because asking through a library in this one could start CUDA before its variables are set.
"""

import subprocess
from dataclasses import dataclass

TIMEOUT_SECONDS = 20.0
_FIELDS = ("uuid", "name", "driver_version", "memory.total", "memory.used")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """One device at one moment."""

    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    """By all processes; never a measure of what this process may take."""


def read_device(device: str) -> DeviceReading | None:
    """The device of an index or uuid, as in `CUDA_VISIBLE_DEVICES`; None where no driver knows it."""
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        uuid, name, driver, total, used = (part.strip() for part in done.stdout.strip().split(","))
        return DeviceReading(
            uuid=uuid, name=name, driver=driver, total_bytes=int(total) * _MIB, used_bytes=int(used) * _MIB
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
