"""One save on its way to the store, while training goes on.

Owns the thread, the wait for it, and what it came to. Knows nothing of how a save is written. The one decision: the
thread is a daemon and is waited for with a deadline, because a rank whose peer hangs must be able to end.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.training.checkpoints.commit import CheckpointCommit


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a save that was committed came to."""

    commit: CheckpointCommit
    write_seconds: float
    """Shards, on the slowest rank."""
    commit_seconds: float
    """Votes, the commit, and retention."""
    trouble: str = ""
    """What went wrong after the commit; it does not matter to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Landing:
    """A save that has ended."""

    step: int
    stall_seconds: float
    written: Written | None
    """None where it failed."""
    error: PipelineError | None


class Flight:
    """A save that has begun."""

    def __init__(self, write: Callable[[], Written], *, step: int, started: float, in_background: bool) -> None:
        """Begin.

        Args:
            write: saves, on all ranks together.
            step: optimizer steps done.
            started: when training began to wait, by `time.monotonic`.
            in_background: False to return when it has ended.
        """
        self.step = step
        self._write = write
        self._written: Written | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True)
            self._thread.start()
        else:
            self._run()
        self._stall_seconds = time.monotonic() - started

    def _run(self) -> None:
        try:
            self._written = self._write()
        except BaseException as error:  # the boundary of the thread: `land` raises it or hands it on
            self._error = error

    @property
    def is_over(self) -> bool:
        """True where `land` returns at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the end; True where it has come."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self.is_over

    def land(self) -> Landing:
        """Wait for the end.

        Raises:
            BaseException: what no save may raise, as it is; contact with another rank was lost, for example.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, PipelineError):
            raise self._error
        return Landing(step=self.step, stall_seconds=self._stall_seconds, written=self._written, error=self._error)
