"""What became of the saves of one start of training, and when the next one is due.

Owns the newest commit, the count of failures, what is reported, and the clock of saves. Knows nothing of files or
ranks. The one decision: a save that fails ends training only where there is no earlier commit to go back to, or where
`MAX_FAILED_SAVES` fail in a row; every rank sees the same saves, so every rank comes to the same end.
"""

import time
from dataclasses import dataclass, field

from pipeline.training.checkpoints.commit import CheckpointCommit
from pipeline.training.checkpoints.flight import Landing
from pipeline.training.checkpoints.interval import SaveInterval
from pipeline.training.reporter import Reporter

MAX_FAILED_SAVES = 3
"""Saves in a row that may fail, this one included, where there is an earlier commit."""


@dataclass(kw_only=True)
class SaveHistory:
    """One rank's memory of its saves."""

    interval: SaveInterval | None
    """Where saves are due by the clock."""
    newest: CheckpointCommit | None = None
    """The last commit that this start made or resumed from."""
    last: Landing | None = None
    _untold: list[Landing] = field(default_factory=list)
    _failed_in_a_row: int = 0
    _begun_at: float = field(default_factory=time.monotonic)
    _num_skipped: int = 0
    _is_put_off: bool = False

    def begin(self, *, at: float) -> None:
        """A save has begun; `at` by `time.monotonic`."""
        self._begun_at, self._is_put_off = at, False

    def end(self, landing: Landing) -> None:
        """A save has ended."""
        self.last = landing
        self._untold.append(landing)
        if landing.written is None:
            self._failed_in_a_row += 1
        else:
            self._failed_in_a_row, self.newest = 0, landing.written.commit

    def check(self) -> None:
        """Raise the last save's error where training may not go on with it.

        Raises:
            PipelineError: as the save raised it.
        """
        allowed = 0 if self.newest is None else MAX_FAILED_SAVES - 1
        if self.last is not None and self.last.error is not None and self._failed_in_a_row > allowed:
            raise self.last.error

    def is_due(self, *, now: float, is_flying: bool) -> bool:
        """True where the clock says that the next save should begin.

        A save that is due while another one is on its way is put off until that has ended, and counted as skipped.
        """
        if self.interval is None:
            return False
        last = self.last
        needed = self.interval.next_seconds(
            stall_seconds=None if last is None else last.stall_seconds,
            write_seconds=0.0 if last is None or last.written is None else last.written.write_seconds,
        )
        if now - self._begun_at < needed:
            return False
        if is_flying:
            self._num_skipped += not self._is_put_off
            self._is_put_off = True
        return not is_flying

    def age_seconds(self) -> float | None:
        """Time since the newest commit, which is what a failure now would lose; None where there is none."""
        return None if self.newest is None else time.time() - self.newest.created_at

    def report(self, reporter: Reporter) -> None:
        """Tell of saves that have ended since the last report."""
        for landing in self._untold:
            values = {"checkpoint_stall_seconds": landing.stall_seconds, "save_skipped": float(self._num_skipped)}
            if landing.written is not None:
                values["checkpoint_write_seconds"] = landing.written.write_seconds
                values["checkpoint_commit_seconds"] = landing.written.commit_seconds
                if landing.written.trouble:
                    reporter.note(f"checkpoint of step {landing.step}: {landing.written.trouble}")
            else:
                reporter.note(
                    f"the save of step {landing.step} failed, {self._failed_in_a_row} in a row of {MAX_FAILED_SAVES} "
                    f"at most: {landing.error}"
                )
            reporter.metrics(values, step=landing.step)
        self._untold.clear()
