"""What a watcher of a run is told.

Owns the seam between the runner and whatever shows a run (the live view, plain lines, JSON lines). The one decision:
observers are told values and can change nothing.
"""

from typing import Protocol

from pipeline.stages.protocol import Report
from pipeline.tracking.view import RunView, StageView


class Observer(Protocol):
    """Called from the runner's thread; must return at once."""

    def run_started(self, run: RunView) -> None:
        """A run begins, or is taken up again."""
        ...

    def stage_changed(self, stage: StageView) -> None:
        """A stage has another status, reason, attempt, metric or verdict."""
        ...

    def reported(self, stage: str, report: Report) -> None:
        """A stage said something."""
        ...

    def waiting(self, stage: str, reason: str) -> None:
        """A stage cannot go on yet, and why; repeated while it lasts."""
        ...

    def run_finished(self, run: RunView) -> None:
        """The run has its final status."""
        ...
