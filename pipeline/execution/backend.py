"""What the runner asks of whatever runs a stage attempt.

Owns the request and outcome that cross the process boundary, and the table of backends. Knows nothing of Ray. The one
decision: an attempt never raises across the boundary; it ends in an outcome that says what class of failure it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.artifacts.commit import CommittedOutput
from pipeline.cluster.capacity import Capacity
from pipeline.errors import FailureClass
from pipeline.spec.gate import GateVerdict
from pipeline.stages.parameters import Parameters
from pipeline.stages.protocol import Report, Resources
from pipeline.stages.registry import Framework

BACKENDS: Mapping[str, str] = {
    "ray": "pipeline.execution.ray_backend:RayBackend",
    "inline": "pipeline.execution.inline_backend:InlineBackend",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRequest:
    """One input as the driver knows it; the worker turns `key` into a local path."""

    stage: str
    output: str
    key: str
    fingerprint: str
    digest: str
    run_id: str
    metrics: Mapping[str, float]
    gates: tuple[GateVerdict, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkRequest:
    """Everything a fresh process needs to run one attempt."""

    kind: str
    run: str
    framework: Framework
    store_url: str
    run_id: str
    flow: str
    stage: str
    attempt: int
    fingerprint: str
    parameters: Parameters
    inputs: Mapping[str, InputRequest]
    output_types: Mapping[str, str]
    attempt_key: str
    workspace_key: str
    log_key: str
    project_root: str
    resources: Resources
    actor_resources: Resources
    """What the stage's own actor occupies; nothing where the work is in a gang or in replicas."""
    deadline: float | None
    ephemeral: bool
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an attempt did not finish."""

    failure_class: FailureClass
    error: str
    """Type of the error."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOutcome:
    """How an attempt ended: outputs, or a failure."""

    outputs: Mapping[str, CommittedOutput] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


class Attempt(Protocol):
    """One attempt under way."""

    def drain(self) -> list[Report]:
        """What it reported since the last call."""
        ...

    def poll(self) -> WorkOutcome | None:
        """How it ended, or None while it runs. Never blocks for long."""
        ...

    def state(self) -> str:
        """`running`, or why it is not yet (`waiting for 2 CPUs`)."""
        ...

    def end(self) -> None:
        """Kill it and what it started; idempotent."""
        ...


class Backend(Protocol):
    """Starts attempts."""

    def capacity(self) -> Capacity:
        """What the cluster has in all."""
        ...

    def start(self, request: WorkRequest) -> Attempt:
        """Start an attempt in a process of its own."""
        ...

    def close(self) -> None:
        """Leave the cluster."""
        ...
