"""What the runner tells a tracker.

Owns the seam between execution and whatever remembers runs. Knows nothing of MLflow. The one decision: a tracker
never raises and never blocks the run for long; what it could not deliver it counts in `gap`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pipeline.stages.protocol import ModelRegistry, Report
from pipeline.tracking.view import RunStatus, RunView, StageView


class Tracker(Protocol):
    """Remembers runs. All calls come from the driver; they may come from several threads."""

    @property
    def gap(self) -> int:
        """Calls that were lost so far."""
        ...

    @property
    def registry(self) -> ModelRegistry:
        """The model registry; its calls do raise `TrackingError`."""
        ...

    def start_run(self, run: RunView) -> None:
        """Open the parent run (or take it up again, by its `run_id` tag)."""
        ...

    def start_attempt(self, run_id: str, stage: StageView, *, attempt: int, parameters: Mapping[str, object]) -> None:
        """Open the child run of one attempt."""
        ...

    def report(self, run_id: str, stage: str, *, attempt: int, reports: Sequence[Report]) -> None:
        """Deliver what a stage reported."""
        ...

    def finish_attempt(self, run_id: str, stage: StageView, *, attempt: int, log_path: Path | None) -> None:
        """Close the child run with the status, metrics, gates and facts of `stage`."""
        ...

    def record_reuse(self, run_id: str, stage: StageView, *, parameters: Mapping[str, object]) -> None:
        """A closed child run for a reused stage, linked to the run that produced its artifact."""
        ...

    def finish_run(self, run: RunView, *, report_path: Path | None) -> None:
        """Close the parent run with its status and attach the report."""
        ...

    def reconcile(self, run_id: str, status: RunStatus) -> None:
        """Set the final status of a run whose driver died (parent and open children)."""
        ...

    def close(self, *, timeout_seconds: float) -> None:
        """Deliver what is queued, at most for so long."""
        ...
