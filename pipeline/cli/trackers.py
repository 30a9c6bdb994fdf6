"""Which tracker a command uses.

Owns the choice; MLflow is loaded only where the command really tracks.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.cli.place import Place
from pipeline.tracking.protocol import Tracker

TRACKERS: Mapping[str, str] = {
    "mlflow": "pipeline.tracking.mlflow_tracker:MlflowTracker",
    "none": "pipeline.tracking.memory_tracker:MemoryTracker",
}
REGISTRY = "pipeline.tracking.mlflow_registry:MlflowRegistry"
DEPLOYMENT_REGISTRY = "pipeline.tracking.mlflow_deployments:MlflowDeployments"
FETCHED_DIRECTORY = "registered-models"
"""In the state directory: models that only the tracking server could give."""


def default_tracking_uri(place: Place) -> str:
    """The server the user named, else SQLite in the state directory."""
    return place.tracking_uri or f"sqlite:///{place.state_directory}/mlflow.db"


def make_tracker(place: Place, *, no_tracking: bool) -> Tracker:
    """The tracker for a run at this place."""
    if no_tracking:
        memory: Tracker = _load("none")()
        return memory
    artifact_root = None if place.tracking_uri else str(place.state_directory / "mlflow-artifacts")
    tracker: Tracker = _load("mlflow")(default_tracking_uri(place), artifact_root=artifact_root)
    return tracker


def registered_source(place: Place, uri: str) -> str:
    """Path or URL of the registered model version `models:/NAME/VERSION` or `models:/NAME@ALIAS`.

    Raises:
        TrackingError: the registry is away or knows no such version.
    """
    registry = _resolve(REGISTRY)(uri=default_tracking_uri(place))
    return str(registry.source(uri, cache=place.state_directory / FETCHED_DIRECTORY))


def deployment_registry(place: Place) -> Any:
    """MLflow's side of deployments: `find_version` and `record_deployment`."""
    return _resolve(DEPLOYMENT_REGISTRY)(uri=default_tracking_uri(place))


def _load(name: str) -> Callable[..., Any]:
    return _resolve(TRACKERS[name])


def _resolve(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return loaded
