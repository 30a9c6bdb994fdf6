"""The tracker that remembers runs in MLflow.

Owns the tracker's threads: one that delivers, one that samples the machine. Loads no MLflow itself. The one decision:
MLflow is resolved by name inside the delivery thread, so that constructing a tracker costs nothing and the seconds
that MLflow needs to import and open its store pass beside the first stages.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import TrackingError
from pipeline.stages.protocol import ModelRegistry, ModelVersion, Report
from pipeline.tracking.delivery import (
    DeliverReports,
    Delivery,
    FinishAttempt,
    FinishRun,
    Reconcile,
    RecordReuse,
    StartAttempt,
    StartRun,
    Writer,
)
from pipeline.tracking.mlflow_settings import ARTIFACT_DIRECTORY, DATABASE_FILE, SQLITE, apply_client_settings
from pipeline.tracking.parameter_table import flatten
from pipeline.tracking.system_metrics import SystemSampler
from pipeline.tracking.view import RunStatus, RunView, StageView

WRITER = "pipeline.tracking.mlflow_writer:MlflowWriter"
REGISTRY = "pipeline.tracking.mlflow_registry:MlflowRegistry"
REGISTRY_FLUSH_SECONDS = 15.0


class MlflowTracker:
    """A `Tracker` on an MLflow server or SQLite file.

    Args:
        uri: `http(s)://...` of a server, or `sqlite:///PATH`.
        artifact_root: directory or URL for artifacts; None leaves the choice to the server.
        experiment: one experiment for all runs; None takes one per flow, named as the flow.
        sample_seconds: between two samples of the machine; 0 samples none.
        patience_seconds: for how long one call waits for a server that is away before it is lost.
    """

    def __init__(
        self,
        uri: str,
        *,
        artifact_root: str | None = None,
        experiment: str | None = None,
        sample_seconds: float = 5.0,
        patience_seconds: float = 60.0,
    ) -> None:
        self.uri = uri
        self._artifact_root = artifact_root
        self._experiment = experiment
        self._delivery = Delivery(self._open_writer, patience_seconds=patience_seconds)
        self._sampler = SystemSampler(self._deliver_reports, interval_seconds=sample_seconds)
        self._registry = _LazyRegistry(uri=uri, delivery=self._delivery)

    @property
    def gap(self) -> int:
        """Calls that were lost so far, and those that wait while the server is away."""
        return self._delivery.gap

    @property
    def last_error(self) -> str:
        """Why the last call failed; empty where none did."""
        return self._delivery.last_error

    @property
    def registry(self) -> ModelRegistry:
        """The model registry on the same server."""
        return self._registry

    def start_run(self, run: RunView) -> None:
        """Open the parent run, or take it up again by its `pipeline.run_id` tag."""
        self._delivery.put(StartRun(run=run))

    def start_attempt(self, run_id: str, stage: StageView, *, attempt: int, parameters: Mapping[str, object]) -> None:
        """Open the child run of one attempt and sample the machine for it."""
        self._delivery.put(StartAttempt(run_id=run_id, stage=stage, attempt=attempt, parameters=flatten(parameters)))
        self._sampler.watch(run_id, stage.name, attempt)

    def report(self, run_id: str, stage: str, *, attempt: int, reports: Sequence[Report]) -> None:
        """Deliver what a stage reported; progress is for the live view and is not kept."""
        kept = tuple(report for report in reports if report.kind != "progress")
        if kept:
            self._deliver_reports(run_id, stage, attempt, kept)

    def finish_attempt(self, run_id: str, stage: StageView, *, attempt: int, log_path: Path | None) -> None:
        """Close the child run with the status, metrics, gates, digests and facts of `stage`."""
        self._sampler.unwatch(run_id, stage.name, attempt)
        self._delivery.put(FinishAttempt(run_id=run_id, stage=stage, attempt=attempt, log_path=log_path))

    def record_reuse(self, run_id: str, stage: StageView, *, parameters: Mapping[str, object]) -> None:
        """A closed child run for a reused stage, linked to the run that produced its artifact."""
        self._delivery.put(RecordReuse(run_id=run_id, stage=stage, parameters=flatten(parameters)))

    def finish_run(self, run: RunView, *, report_path: Path | None) -> None:
        """Close the parent run with its status, every stage's final metrics and the report."""
        self._delivery.put(FinishRun(run=run, report_path=report_path))

    def reconcile(self, run_id: str, status: RunStatus) -> None:
        """Set the final status of a run whose driver died, and of its children that are still open."""
        self._delivery.put(Reconcile(run_id=run_id, status=status))

    def close(self, *, timeout_seconds: float) -> None:
        """Deliver what is queued, at most for so long; about a second where the server is away."""
        self._sampler.close()
        self._delivery.close(timeout_seconds=timeout_seconds)

    def _deliver_reports(self, run_id: str, stage: str, attempt: int, reports: tuple[Report, ...]) -> None:
        self._delivery.put(DeliverReports(run_id=run_id, stage=stage, attempt=attempt, reports=reports))

    def _open_writer(self) -> Writer:
        writer: Writer = _resolve(WRITER)(uri=self.uri, artifact_root=self._artifact_root, experiment=self._experiment)
        return writer


def store_tracker(
    store_directory: Path, *, experiment: str | None = None, sample_seconds: float = 5.0
) -> MlflowTracker:
    """The default: SQLite and artifacts beside the store's own files, on this machine."""
    return MlflowTracker(
        sqlite_uri(store_directory),
        artifact_root=artifact_root(store_directory),
        experiment=experiment,
        sample_seconds=sample_seconds,
    )


def sqlite_uri(store_directory: Path) -> str:
    """`sqlite:///<store>/mlflow.db`."""
    return f"{SQLITE}{store_directory.absolute() / DATABASE_FILE}"


def artifact_root(store_directory: Path) -> str:
    """`<store>/mlflow-artifacts`, where the artifacts of the SQLite default lie."""
    return str(store_directory.absolute() / ARTIFACT_DIRECTORY)


class _LazyRegistry:
    """Resolves MLflow's registry when a stage registers, after the run it links to was delivered."""

    def __init__(self, *, uri: str, delivery: Delivery) -> None:
        self._uri = uri
        self._delivery = delivery

    def has(self, *, name: str, version: str) -> bool:
        """As `ModelRegistry.has`, once everything queued is delivered: MLflow cannot be imported by two threads."""
        if not self._delivery.flush(timeout_seconds=REGISTRY_FLUSH_SECONDS):
            raise TrackingError(f"cannot look for {name!r}: the tracking server does not answer")
        registry: ModelRegistry = _resolve(REGISTRY)(uri=self._uri)
        return registry.has(name=name, version=version)

    def register(
        self, *, name: str, source: str, tags: Mapping[str, str], alias: str | None, description: str
    ) -> ModelVersion:
        """As `ModelRegistry.register`."""
        self._delivery.flush(timeout_seconds=REGISTRY_FLUSH_SECONDS)
        registry: ModelRegistry = _resolve(REGISTRY)(uri=self._uri)
        return registry.register(name=name, source=source, tags=tags, alias=alias, description=description)


def _resolve(dotted: str) -> Any:
    apply_client_settings()
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
