"""The environment of a replica's process, complete before it loads jax.

Owns the variables that hold a process to its share of a device. Loads no framework. The one decision: the share is
turned into a fraction in the replica's own process, which alone knows its device's size, and before jax is there: the
variables are read once, when jax starts.
"""

import importlib.metadata
import os
import stat
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.ledger import grant_of
from pipeline.errors import ParameterError
from pipeline.serving.accelerator.device_reserve import known_reserve
from pipeline.serving.accelerator.nvidia import DeviceReading, read_device

CPU_DEVICES_FLAG = "--xla_force_host_platform_device_count"
NUM_HOSTS = "PIPELINE_NUM_HOSTS"
"""Absent where it is one."""
SHARE = "PIPELINE_GPU_SHARE"
STATE = "PIPELINE_STATE_DIRECTORY"
MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The name until jaxlib 0.10; since then jax refuses to start on a GPU where both are set."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessShare:
    """What a process was given of its device."""

    share: float
    """0 where the process has no device."""
    device: str = ""
    """uuid where the driver told it, else the index; empty where there is none."""
    image: str = ""
    """Which libraries, device and driver: what its reserve depends on."""
    state_directory: Path | None = None
    memory_reason: str = ""
    """The arithmetic of its memory."""
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """For `/health`."""
        if self.share <= 0:
            return {}
        return {"gpus": self.share, "share_reason": self.memory_reason, "share_warnings": list(self.warnings)}


NO_SHARE = ProcessShare(share=0.0)


def replica_environment(
    *, device: str, gpus: float, state_directory: str | None, cpu_devices: int = 1, num_hosts: int = 1
) -> dict[str, str]:
    """Variables that the process is started with; `settle` makes them complete there.

    Args:
        device: `auto`, `cpu` or `cuda`.
        gpus: of each process; a part, or whole devices.
        state_directory: where what was measured of devices is kept.
        cpu_devices: as how many devices jax shows the processor where there is no GPU.
        num_hosts: over which the model lies.
    """
    known = {} if state_directory is None else {STATE: state_directory}
    if num_hosts > 1:
        known[NUM_HOSTS] = str(num_hosts)
    if gpus <= 0:
        shown = {} if cpu_devices == 1 else {"XLA_FLAGS": f"{CPU_DEVICES_FLAG}={cpu_devices}"}
        return {**known, "JAX_PLATFORMS": "cpu", **shown} if device != "cuda" else {**known, **shown}
    return {**known, SHARE: f"{gpus:g}"}


def settle(environment: MutableMapping[str, str] = os.environ) -> ProcessShare:
    """Set what jax and CUDA read when they start; to be called in the replica's process before it loads jax.

    Raises:
        ParameterError: the share is too small for this device.
        RuntimeError: jax is loaded already and would not see the variables.
    """
    share = float(environment.get(SHARE, "0"))
    if share <= 0:
        return NO_SHARE
    if "jax" in sys.modules:
        raise RuntimeError("jax was loaded before the process's share of its device was set")
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    found = read_device(visible)
    state = Path(environment[STATE]) if STATE in environment else None
    image = _image(found)
    grant = grant_of(
        share,
        total_bytes=None if found is None else found.total_bytes,
        reserve=known_reserve(state, image=image),
    )
    environment.pop(OLD_FRACTION, None)
    environment[FRACTION], environment[PREALLOCATE] = f"{grant.fraction:.4f}", "true"
    return ProcessShare(
        share=share,
        device=visible if found is None else found.uuid,
        image=image,
        state_directory=state,
        memory_reason=grant.reason,
        warnings=_share_threads(environment, share) if found is not None else (),
    )


def mps_directory(environment: MutableMapping[str, str]) -> Path | None:
    """Where a running multi-process service listens, or None where there is none."""
    directory = Path(environment.get(MPS_DIRECTORY, MPS_DEFAULT_DIRECTORY))
    try:
        mode = (directory / "control").stat().st_mode
    except OSError:
        return None
    return directory if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def _share_threads(environment: MutableMapping[str, str], share: float) -> tuple[str, ...]:
    if share >= 1:
        return ()
    if mps_directory(environment) is None:
        return (
            f"this process has {share:g} of its GPU and no multi-process service (MPS) runs here: processes on the "
            "GPU take turns; start nvidia-cuda-mps-control, or serve several models in one process (isolation: shared)",
        )
    environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * share:g}"
    return ()


def _image(found: DeviceReading | None) -> str:
    if found is None:
        return ""
    try:
        jaxlib = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError as error:
        raise ParameterError(
            "jaxlib is not installed here", hint="install the package with its extra cuda12"
        ) from error
    return f"jaxlib {jaxlib}, {found.name}, driver {found.driver}"
