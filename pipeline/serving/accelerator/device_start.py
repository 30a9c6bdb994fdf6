"""The moment in which a process starts on its device.

Owns what is done around it: one process at a time, and a measurement of what it took. The one decision: only the first
model of a process is measured, because only then is the device's gain all this process's.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from pipeline.serving.accelerator.device_reserve import remember_reserve
from pipeline.serving.accelerator.nvidia import read_device
from pipeline.serving.accelerator.replica_environment import ProcessShare
from pipeline.serving.accelerator.start_lock import START_TIMEOUT_SECONDS, starting_alone

_LOG = logging.getLogger(__name__)


@contextmanager
def started_on(
    share: ProcessShare, *, who: str, is_first: bool, timeout_seconds: float = START_TIMEOUT_SECONDS
) -> Iterator[None]:
    """Load and compile inside; nothing else starts on the device meanwhile.

    Args:
        share: of this process; one without a device waits for nobody.
        who: named to those who wait.
        is_first: whether this is the process's first model.
        timeout_seconds: how long to wait for others.

    Raises:
        ClusterError: another process has been starting for too long.
    """
    if not share.device:
        yield
        return
    with starting_alone(share.device, who=who, timeout_seconds=timeout_seconds, on_wait=_LOG.warning):
        before = read_device(share.device) if is_first and share.image else None
        yield
        after = None if before is None else read_device(share.device)
        if before is None or after is None or share.state_directory is None:
            return
        stats = jax.local_devices()[0].memory_stats() or {}
        allocated = int(stats.get("pool_bytes") or stats.get("bytes_limit", 0))  # preallocated: the limit is taken
        kept = remember_reserve(
            share.state_directory,
            image=share.image,
            before=before.used_bytes,
            after=after.used_bytes,
            allocated=allocated,
        )
        _LOG.info("%s: what this process takes beside its allocator: %s", share.image, kept)
