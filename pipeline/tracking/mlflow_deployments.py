"""Deployments in MLflow's model registry.

Owns what a change of a deployment leaves there, and how a version is found for one. Knows nothing of Ray or of what
serves. The one decision: `champion` is what serves, `previous` what served before it, and the version that was brought
carries the whole event as a tag, so the registry alone tells who put it there and why.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mlflow.tracking import MlflowClient

from pipeline.errors import TrackingError
from pipeline.tracking.delivery import RefusedError, ServerAwayError
from pipeline.tracking.mlflow_client import open_client, translated
from pipeline.tracking.mlflow_entities import MAX_TAG
from pipeline.tracking.mlflow_registry import move_alias
from pipeline.tracking.redaction import scrub

CHAMPION = "champion"
PREVIOUS = "previous"
_UNRECORDED = ("settings",)
"""Parts of an event that stay in the store."""


class MlflowDeployments:
    """The registry as deployments see it; opened for each use.

    Args:
        uri: tracking server or `sqlite:///` file; the registry is on the same server.
    """

    def __init__(self, *, uri: str) -> None:
        self._uri = uri

    def find_version(self, name: str, version: str) -> dict[str, Any] | None:
        """`version`, `digest` and `gates` of a registered version, by its number or an alias.

        A version that says no digest gets one of its name, which tells it apart from others.

        Raises:
            TrackingError: the registry is away.
        """
        try:
            client = open_client(self._uri)
            with translated(self._uri):
                known = client.get_registered_model(name).aliases
                found = client.get_model_version(name, str(known.get(version, version)))
        except ServerAwayError as error:
            raise TrackingError(f"cannot look for version {version!r} of {name!r}: {error}") from error
        except RefusedError:
            return None  # it answered, and knows no such model or version
        gates = {key.removeprefix("gate."): value for key, value in found.tags.items() if key.startswith("gate.")}
        return {
            "version": str(found.version),
            "digest": found.tags.get("model.digest") or hashlib.sha256(f"{name}/{found.version}".encode()).hexdigest(),
            "gates": gates,
        }

    def record_deployment(self, event: Mapping[str, Any]) -> None:
        """Leave an event on the version it brought, and move the aliases.

        Raises:
            TrackingError: the registry is away or refused.
        """
        try:
            client = open_client(self._uri)
            with translated(self._uri):
                remember_deployment(client, event)
        except (ServerAwayError, RefusedError) as error:
            raise TrackingError(
                f"the change of {event['name']!r} is done and in the store, but not in the model registry: {error}",
                hint="start the tracking server; aliases follow with the next change",
            ) from error


def remember_deployment(client: MlflowClient, event: Mapping[str, Any]) -> None:
    """As `MlflowDeployments.record_deployment`, in MLflow's own errors; nothing where the version is not registered.

    Doing it again changes nothing.
    """
    name, target, source = event["registered_model"], event["target"], event["source"]
    if not name:
        return
    moment = datetime.fromtimestamp(event["when"], UTC)
    kept = {key: value for key, value in event.items() if key not in _UNRECORDED}
    tag = f"deployment.{event['name']}.{event['action']}.{moment:%Y%m%dT%H%M%S.%fZ}"
    text = scrub(json.dumps(kept))
    if len(text) > MAX_TAG:  # the version has its gates as tags of its own
        text = scrub(json.dumps({**kept, "gates": {}}))
    client.set_model_version_tag(name, target["version"], tag, text)
    if source is not None and source["version"].isdigit() and source["version"] != target["version"]:
        move_alias(client, name=name, alias=PREVIOUS, version=source["version"], run_id="")
    move_alias(client, name=name, alias=CHAMPION, version=target["version"], run_id="")
