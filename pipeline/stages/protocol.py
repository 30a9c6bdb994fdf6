"""What a stage is given and what it gives back.

Owns the contract between the runner and the code of a stage. Knows nothing of Ray, MLflow, torch or jax. The one
decision: a stage is a plain function `(StageContext) -> StageResult`; whatever it wants remembered goes through
`context.reporter`, whatever it wants kept goes under `context.output(NAME)`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pipeline.errors import StageError
from pipeline.spec.gate import GateVerdict

ParametersT = TypeVar("ParametersT")
JSON = Any
"""A value `json.dumps` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One thing a stage said while it ran; crosses process boundaries as is.

    `kind` is one of `metrics`, `progress`, `note`, `figure`, `dataset`; `payload` is JSON and its shape is fixed by the
    method of `Reporter` that made it.
    """

    kind: str
    payload: Mapping[str, JSON]
    time: float
    """Seconds since the epoch, by the clock of the process that reported."""
    step: int | None = None


class Reporter(Protocol):
    """Where a stage says what happens. Every method returns at once and never raises because tracking is away."""

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Record metric values, at a step while training runs."""
        ...

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        """Say how far the stage is; shown in the live view."""
        ...

    def note(self, text: str) -> None:
        """Record a line of the stage's log that a person should see."""
        ...

    def figure(self, name: str, *, chart: Mapping[str, JSON]) -> None:
        """Record a picture for the run report.

        `chart` is `{"title", "kind": "lines" | "scatter" | "bars", "x_label", "y_label", "x_scale": "linear" | "log",
        "y_scale": "linear" | "log", "series": [{"name", "x": [...], "y": [...]}]}`.
        """
        ...

    def dataset(self, name: str, *, digest: str, source: str, facts: Mapping[str, JSON]) -> None:
        """Record a dataset the stage read or wrote, with its digest."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InputArtifact:
    """A committed output of an earlier stage, readable under `path`."""

    stage: str
    output: str
    path: Path
    """A local directory. Read only."""
    fingerprint: str
    """Of the stage that produced it."""
    digest: str
    """sha256 over the names and contents of its files."""
    run_id: str
    """The run that produced it."""
    metrics: Mapping[str, float]
    """The metrics of the stage that produced it."""
    gates: tuple[GateVerdict, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one stage asks of the cluster, for each worker or replica.

    `gpus` may be a fraction; None leaves it open (`auto`) until the cluster is known. A running stage never sees None.
    `workers` is the gang size of a training stage, the largest one where it is elastic.
    """

    workers: int = 1
    min_workers: int | None = None
    """Fewest workers that an elastic gang goes on with; None where the number is fixed."""
    cpus: float = 0.5
    gpus: float | None = None
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A version in the model registry."""

    name: str
    version: str
    alias: str | None
    uri: str


class ModelRegistry(Protocol):
    """The part of the tracker that a registering stage may use; only stages that run on the driver get one."""

    def has(self, *, name: str, version: str) -> bool:
        """True where the registry holds this version of this model.

        Raises:
            TrackingError: the registry is away or refused.
        """
        ...

    def register(
        self, *, name: str, source: str, tags: Mapping[str, str], alias: str | None, description: str
    ) -> ModelVersion:
        """Create a version that points at `source` and move `alias` to it.

        Raises:
            TrackingError: the registry is away or refused.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StageContext(Generic[ParametersT]):
    """Everything a stage may know."""

    run_id: str
    flow: str
    stage: str
    attempt: int
    """Counts from 1."""
    fingerprint: str
    parameters: ParametersT
    """The kind's pydantic model, references resolved."""
    inputs: Mapping[str, InputArtifact]
    """By parameter name; a list parameter's items are `name.0`, `name.1`, ..."""
    output_root: Path
    """Directory of this attempt, invisible to others until the runner commits it."""
    workspace: str
    """fsspec URL or path that survives the attempts of this fingerprint (training checkpoints); shared by all nodes."""
    project_root: Path
    """Directory that relative paths of the flow start from."""
    resources: Resources
    reporter: Reporter
    deadline: float | None
    """Seconds since the epoch after which the attempt is ended, or None."""
    ephemeral: bool = False
    """True where nothing may stay up after the run."""
    registry: ModelRegistry | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the runner knows of the cluster and a stage may need (`deployments_directory`, `store`, ...)."""

    def output(self, name: str) -> Path:
        """The (created) directory for the output `name`."""
        directory = self.output_root / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def seconds_left(self) -> float:
        """Seconds until the deadline; infinity where there is none."""
        return float("inf") if self.deadline is None else self.deadline - time.time()

    def input(self, name: str) -> InputArtifact:
        """The input artifact behind the parameter `name`.

        Raises:
            StageError: the flow gave no such input.
        """
        try:
            return self.inputs[name]
        except KeyError:
            raise StageError(
                f"stage {self.stage!r}: no input {name!r}; it has: {', '.join(sorted(self.inputs)) or 'none'}"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a stage gives back, beside the files it wrote."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final values; gates are conditions on these."""
    facts: Mapping[str, JSON] = field(default_factory=dict)
    """What was chosen and why (`device`, `device_reason`, ...), and what a person wants to read (`url`)."""


StageFunction = Callable[[StageContext[Any]], StageResult]
