"""A tracker that remembers in this process alone.

Owns the implementation behind `--no-tracking` and the tests. Knows nothing of MLflow. The one decision: it has no
registry unless it is given one, because a version that is forgotten when the process ends was never registered.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import TrackingError
from pipeline.stages.protocol import ModelRegistry, ModelVersion, Report
from pipeline.tracking.parameter_table import flatten
from pipeline.tracking.view import RunStatus, RunView, StageStatus, StageView


@dataclass(kw_only=True)
class RememberedAttempt:
    """A child run: an attempt, or (`attempt` 0) a reused stage."""

    stage: StageView
    attempt: int
    parameters: Mapping[str, str]
    reports: list[Report] = field(default_factory=list)
    status: StageStatus | RunStatus = StageStatus.RUNNING
    log_path: Path | None = None


@dataclass(kw_only=True)
class RememberedRun:
    """A parent run and its children in the order they were opened."""

    run: RunView
    status: RunStatus = RunStatus.RUNNING
    attempts: list[RememberedAttempt] = field(default_factory=list)
    report_path: Path | None = None
    times_started: int = 1


class MemoryTracker:
    """A `Tracker` whose memory is `runs`, by run id."""

    def __init__(self, *, registry: ModelRegistry | None = None) -> None:
        self.runs: dict[str, RememberedRun] = {}
        self._registry = registry or NoRegistry()
        self._lock = threading.Lock()
        self._gap = 0

    @property
    def gap(self) -> int:
        """Calls about runs that were never started."""
        return self._gap

    @property
    def registry(self) -> ModelRegistry:
        """The registry it was given, or one that refuses."""
        return self._registry

    def start_run(self, run: RunView) -> None:
        """Open the run, or take it up again."""
        with self._lock:
            known = self.runs.get(run.run_id)
            if known is None:
                self.runs[run.run_id] = RememberedRun(run=run)
            else:
                known.run, known.status, known.times_started = run, RunStatus.RUNNING, known.times_started + 1

    def start_attempt(self, run_id: str, stage: StageView, *, attempt: int, parameters: Mapping[str, object]) -> None:
        """Open an attempt; asking again for the same one changes nothing."""
        with self._lock:
            if self._find(run_id, stage.name, attempt) is None:
                self._add(run_id, RememberedAttempt(stage=stage, attempt=attempt, parameters=flatten(parameters)))

    def report(self, run_id: str, stage: str, *, attempt: int, reports: Sequence[Report]) -> None:
        """Keep what a stage reported."""
        with self._lock:
            found = self._find(run_id, stage, attempt)
            if found is None:
                self._gap += 1
            else:
                found.reports.extend(reports)

    def finish_attempt(self, run_id: str, stage: StageView, *, attempt: int, log_path: Path | None) -> None:
        """Close an attempt; one that was never opened is opened first."""
        with self._lock:
            found = self._find(run_id, stage.name, attempt)
            if found is None:
                found = RememberedAttempt(stage=stage, attempt=attempt, parameters={})
                self._add(run_id, found)
            view = next((a for a in stage.attempts if a.attempt == attempt), None)
            ended = view is not None and view.status is not StageStatus.RUNNING
            found.stage, found.log_path = stage, log_path
            found.status = view.status if view is not None and ended else stage.status

    def record_reuse(self, run_id: str, stage: StageView, *, parameters: Mapping[str, object]) -> None:
        """Keep a reused stage once."""
        with self._lock:
            if self._find(run_id, stage.name, 0) is None:
                reused = RememberedAttempt(
                    stage=stage, attempt=0, parameters=flatten(parameters), status=StageStatus.REUSED
                )
                self._add(run_id, reused)

    def finish_run(self, run: RunView, *, report_path: Path | None) -> None:
        """Close the run."""
        with self._lock:
            known = self.runs.setdefault(run.run_id, RememberedRun(run=run))
            known.run, known.status, known.report_path = run, run.status, report_path

    def reconcile(self, run_id: str, status: RunStatus) -> None:
        """Set the final status of a run that is still open, and of its open attempts."""
        with self._lock:
            known = self.runs.get(run_id)
            if known is None:
                return
            if known.status is RunStatus.RUNNING:
                known.status = status
            for attempt in known.attempts:
                if attempt.status is StageStatus.RUNNING:
                    attempt.status = status

    def close(self, *, timeout_seconds: float) -> None:
        """Nothing is queued here."""

    def _find(self, run_id: str, stage: str, attempt: int) -> RememberedAttempt | None:
        known = self.runs.get(run_id)
        candidates = known.attempts if known else ()
        return next((a for a in candidates if a.stage.name == stage and a.attempt == attempt), None)

    def _add(self, run_id: str, attempt: RememberedAttempt) -> None:
        if run_id in self.runs:
            self.runs[run_id].attempts.append(attempt)
        else:
            self._gap += 1


class NoRegistry:
    """The registry of a run without tracking."""

    def has(self, *, name: str, version: str) -> bool:
        """Always raises: nobody can be asked.

        Raises:
            TrackingError: always.
        """
        raise TrackingError(f"cannot look for version {version} of {name!r}: this run is not tracked")

    def register(
        self, *, name: str, source: str, tags: Mapping[str, str], alias: str | None, description: str
    ) -> ModelVersion:
        """Always raises: nothing would remember the version.

        Raises:
            TrackingError: always.
        """
        raise TrackingError(
            f"cannot register {name!r}: this run is not tracked, so there is no model registry",
            hint="run without --no-tracking, or take the register.model stage out of the flow",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RememberedVersion:
    """A version as it was registered."""

    version: ModelVersion
    source: str
    tags: Mapping[str, str]
    description: str


class MemoryRegistry:
    """A `ModelRegistry` for tests: versions in order, aliases, and the moves of the aliases."""

    def __init__(self) -> None:
        self.versions: list[RememberedVersion] = []
        self.aliases: dict[tuple[str, str], str] = {}
        self.moves: list[dict[str, str | float | None]] = []

    def has(self, *, name: str, version: str) -> bool:
        """As `ModelRegistry.has`."""
        return any((known.version.name, known.version.version) == (name, version) for known in self.versions)

    def register(
        self, *, name: str, source: str, tags: Mapping[str, str], alias: str | None, description: str
    ) -> ModelVersion:
        """As `ModelRegistry.register`; the same run and fingerprint give the version that exists."""
        same = [
            known
            for known in self.versions
            if known.version.name == name and _identity(known.tags) == _identity(tags) != (None, None)
        ]
        number = same[0].version.version if same else str(sum(v.version.name == name for v in self.versions) + 1)
        version = ModelVersion(name=name, version=number, alias=alias, uri=f"models:/{name}/{number}")
        if not same:
            self.versions.append(
                RememberedVersion(version=version, source=source, tags=dict(tags), description=description)
            )
        if alias is not None and self.aliases.get((name, alias)) != number:
            self.moves.append(
                {"alias": alias, "from": self.aliases.get((name, alias)), "to": number, "when": time.time()}
            )
            self.aliases[name, alias] = number
        return version


def _identity(tags: Mapping[str, str]) -> tuple[str | None, str | None]:
    return tags.get("pipeline.run_id"), tags.get("pipeline.fingerprint")
