"""A run as a person wants to see it: values only, made from the journal.

Owns the shapes that `pipeline show`, the run report and the MLflow tracker read. Knows nothing of where they come
from. The one decision: everything shown of a run is derivable from its journal and the artifacts' commits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.spec.gate import GateVerdict

JSON = Any


class RunStatus(StrEnum):
    """Of a whole run."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    INTERRUPTED = "INTERRUPTED"
    CRASHED = "CRASHED"


class StageStatus(StrEnum):
    """Of one stage in a run."""

    PENDING = "PENDING"
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    REUSED = "REUSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    INTERRUPTED = "INTERRUPTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """One attempt of a stage; times are seconds since the epoch."""

    attempt: int
    started_at: float
    ended_at: float | None = None
    status: StageStatus = StageStatus.RUNNING
    failure_class: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HopView:
    """A fallback that was taken."""

    time: float
    """Seconds since the epoch."""
    after_attempt: int
    """The attempt that failed; 0 where none could be started."""
    failure_class: str
    error: str
    """First line of the error."""
    to: str
    """What the stage is tried with from here on, in words."""

    def __str__(self) -> str:
        return f"after attempt {self.after_attempt} ({self.failure_class}: {self.error}): {self.to}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPoint:
    """One value of a metric while a stage ran."""

    step: int
    value: float
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageView:
    """One stage of a run."""

    name: str
    kind: str
    status: StageStatus
    reason: str
    """Why it ran or was reused."""
    needs: tuple[str, ...] = ()
    fingerprint: str | None = None
    producer_run_id: str | None = None
    """The run that computed the artifact; another one where the stage was reused."""
    attempts: tuple[AttemptView, ...] = ()
    hops: tuple[HopView, ...] = ()
    """Fallbacks that were taken, in order."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    gates: tuple[GateVerdict, ...] = ()
    facts: Mapping[str, JSON] = field(default_factory=dict)
    series: Mapping[str, Sequence[SeriesPoint]] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    """Chart descriptions as `Reporter.figure` takes them, by name."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each output."""

    @property
    def started_at(self) -> float | None:
        """When the first attempt started."""
        return self.attempts[0].started_at if self.attempts else None

    @property
    def ended_at(self) -> float | None:
        """When the last attempt ended."""
        return self.attempts[-1].ended_at if self.attempts else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """One run of a flow."""

    run_id: str
    flow: str
    flow_file: str
    status: RunStatus
    started_at: float
    ended_at: float | None
    parameters: Mapping[str, JSON]
    stages: tuple[StageView, ...]
    error: str | None = None
    host: str = ""
    user: str = ""
    flow_text: str = ""
    """The resolved flow as YAML."""
    tracking_gap: int = 0
    """Tracking calls that were lost because the server was away."""
