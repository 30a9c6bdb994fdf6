"""MLflow's model registry.

Owns versions, aliases and the record of their moves. Knows nothing of what a model is. The one decision: aliases, not
stages, and every move of one leaves a tag on the version it reached and on the one it left, because MLflow itself
forgets where an alias was.
"""

import getpass
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion as MlflowVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.errors import TrackingError
from pipeline.stages.protocol import ModelVersion
from pipeline.tracking.delivery import RefusedError, ServerAwayError
from pipeline.tracking.mlflow_client import all_experiments, find_run, open_client, translated
from pipeline.tracking.redaction import scrub

_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>[0-9]+)|@(?P<alias>[^/@]+))")
_SERVED = ("mlflow-artifacts:", "runs:", "models:", "http:", "https:", "dbfs:")
"""Schemes of sources that MLflow's client must fetch."""
SAME_VERSION_TAGS = ("pipeline.run_id", "pipeline.fingerprint")
"""A version with these tags and the same source is the one a repeated call means."""


class MlflowRegistry:
    """The `ModelRegistry` behind `MlflowTracker`; opened for each use, from any thread of the driver.

    Args:
        uri: tracking server or `sqlite:///` file; the registry is on the same server.
    """

    def __init__(self, *, uri: str) -> None:
        self._uri = uri

    def has(self, *, name: str, version: str) -> bool:
        """True where the registry holds this version and has not deleted it.

        Raises:
            TrackingError: the registry is away or refused.
        """
        try:
            client = open_client(self._uri)
            with translated(self._uri):
                return client.get_model_version(name, version).current_stage != "Deleted_Internal"
        except ServerAwayError as error:
            raise TrackingError(f"cannot look for {name!r}: the model registry is away: {error}") from error
        except RefusedError:
            return False  # it answered, and knows no such model or version

    def source(self, uri: str, *, cache: Path) -> str:
        """Path or URL of the model that `models:/NAME/VERSION` or `models:/NAME@ALIAS` names.

        Args:
            uri: of the version.
            cache: where a model is put that only the tracking server can give.

        Raises:
            TrackingError: the registry is away, knows no such model or version, or the URI is malformed.
        """
        name, version, alias = _parts(uri)
        try:
            client = open_client(self._uri)
            with translated(self._uri):
                found = (
                    client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, version)
                )
                place = str(found.source)
                if place.startswith(_SERVED):
                    cache.mkdir(parents=True, exist_ok=True)
                    place = download_artifacts(artifact_uri=place, dst_path=str(cache), tracking_uri=self._uri)
                return place
        except ServerAwayError as error:
            raise TrackingError(f"{uri}: the model registry is away: {error}") from error
        except RefusedError as error:
            raise TrackingError(
                f"{uri}: the model registry at {scrub(self._uri)} does not give it: {error}",
                hint="list what it holds with `pipeline ui`, or name the model's directory",
            ) from error

    def register(
        self, *, name: str, source: str, tags: Mapping[str, str], alias: str | None, description: str
    ) -> ModelVersion:
        """Create a version that points at `source` and move `alias` to it.

        The version links to the MLflow parent run named by the tag `pipeline.run_id`. Asking again with the same
        `pipeline.run_id` and `pipeline.fingerprint` gives the version that exists. A server that cannot read a local
        `source` gets a copy of it among the artifacts of that parent run.

        Raises:
            TrackingError: the registry is away or refused.
        """
        try:
            client = open_client(self._uri)
            with translated(self._uri):
                return self._register(client, name=name, source=source, tags=tags, alias=alias, description=description)
        except ServerAwayError as error:
            raise TrackingError(
                f"cannot register {name!r}: the model registry is away: {error}",
                hint="start the tracking server, then run the same flow again; finished stages are reused",
            ) from error
        except RefusedError as error:
            raise TrackingError(f"cannot register {name!r}: the model registry refused: {error}") from error

    def _register(
        self,
        client: MlflowClient,
        *,
        name: str,
        source: str,
        tags: Mapping[str, str],
        alias: str | None,
        description: str,
    ) -> ModelVersion:
        _ensure_model(client, name)
        tags = {key: scrub(value) for key, value in tags.items()}
        version = _same_version(client, name, tags)
        if version is None:
            parent = None
            if "pipeline.run_id" in tags:
                wanted = {"pipeline.run_id": tags["pipeline.run_id"], "pipeline.role": "run"}
                parent = find_run(client, all_experiments(client), wanted)
            version = client.create_model_version(
                name,
                self._readable_source(client, source=source, parent=parent, name=name),
                run_id=parent,
                tags=tags,
                description=description,
                await_creation_for=30,
            )
        number = str(version.version)
        if alias is not None:
            move_alias(client, name=name, alias=alias, version=number, run_id=tags.get("pipeline.run_id", ""))
        return ModelVersion(name=name, version=number, alias=alias, uri=f"models:/{name}/{number}")

    def _readable_source(self, client: MlflowClient, *, source: str, parent: str | None, name: str) -> str:
        """`source`, or the copy of a local directory that a remote server can reach."""
        local = "://" not in source or source.startswith("file:")
        if not local or not self._uri.startswith(("http://", "https://")) or parent is None:
            return source
        client.log_artifacts(parent, source.removeprefix("file://"), f"models/{name}")
        return f"{client.get_run(parent).info.artifact_uri}/models/{name}"


def _parts(uri: str) -> tuple[str, str, str]:
    """Name, version and alias; one of the latter is empty."""
    found = _MODEL_URI.fullmatch(uri)
    if found is None:
        raise TrackingError(f"{uri}: no model version", hint="allowed: models:/NAME/VERSION or models:/NAME@ALIAS")
    return found["name"], found["version"] or "", found["alias"] or ""


def _ensure_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _same_version(client: MlflowClient, name: str, tags: Mapping[str, str]) -> MlflowVersion | None:
    identity = {key: tags.get(key) for key in SAME_VERSION_TAGS}
    if None in identity.values():
        return None
    for version in client.search_model_versions(f"name = '{name}'", max_results=1000):
        if all(version.tags.get(key) == value for key, value in identity.items()):
            return version
    return None


def _alias_target(client: MlflowClient, name: str, alias: str) -> str | None:
    found = client.get_registered_model(name).aliases.get(alias)
    return None if found is None else str(found)


def move_alias(client: MlflowClient, *, name: str, alias: str, version: str, run_id: str) -> None:
    """Move the alias and tag both versions with `alias_move.ALIAS.TIME`; nothing where it is there already."""
    previous = _alias_target(client, name, alias)
    if previous == version:
        return
    client.set_registered_model_alias(name, alias, version)
    when = datetime.now(UTC)
    record = {
        "alias": alias,
        "from": previous,
        "to": version,
        "who": getpass.getuser(),
        "when": when.isoformat(timespec="seconds"),
        "run_id": run_id,
    }
    key = f"alias_move.{alias}.{when:%Y%m%dT%H%M%S.%fZ}"
    for target in (version, previous):
        if target is not None:
            client.set_model_version_tag(name, target, key, json.dumps(record))
