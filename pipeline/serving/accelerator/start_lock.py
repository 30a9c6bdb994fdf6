"""Replicas of one device start one after the other.

Owns the lock. Loads no framework. The one decision: a file lock of the machine, keyed by the device, because a device
belongs to one machine and the system frees the lock of a process that dies. Each user has locks of its own: a file in a
directory for all cannot be opened by others.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import ClusterError

POLL_SECONDS = 0.1
START_TIMEOUT_SECONDS = 900.0
"""Of all starts before this one together."""


@contextmanager
def starting_alone(
    device: str,
    *,
    who: str,
    timeout_seconds: float = START_TIMEOUT_SECONDS,
    directory: Path | None = None,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Iterator[float]:
    """Hold the start of `device`; gives the seconds that were waited.

    Args:
        device: its uuid or index.
        who: named to those who wait.
        timeout_seconds: how long to wait.
        directory: of the lock; the machine's temporary one when None.
        on_wait: told once who is waited for.

    Raises:
        ClusterError: the lock is not to be had in time; names who holds it.
    """
    name = re.sub(r"[^\w.-]", "_", device)
    path = (
        Path(tempfile.gettempdir()) if directory is None else directory
    ) / f"pipeline-start-{os.getuid()}-{name}.lock"
    started = time.monotonic()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        said = False
        while not _locked(handle):
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            if not said:
                on_wait(f"waiting for {holder}, which starts on the same device ({device})")
                said = True
            if time.monotonic() - started > timeout_seconds:
                raise ClusterError(
                    f"device {device}: {holder} has been starting on it for more than {timeout_seconds:g} s, and {who} "
                    "waits for it to be done: replicas of one device start one after the other",
                    hint="look at that process's log; end it where it hangs",
                )
            time.sleep(POLL_SECONDS)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{who} (process {os.getpid()})".encode(), 0)
        yield time.monotonic() - started
    finally:
        os.close(handle)  # frees the lock, too


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
