"""What happened to a deployment: who changed it, when, from which version to which, and why that was allowed.

Owns the record of one event and its place in the store. Loads no framework. The one decision: an event is one immutable
object that is created once and never changed, and it holds the whole settings of the version it brought, so the history
alone is enough to go back.
"""

import getpass
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipeline.artifacts.store import Store
from pipeline.errors import StoreError
from pipeline.serving.replica_settings import ACCESS_FIELDS, ReplicaSettings

PREFIX = "deployments"
TRIALS = ("canary", "shadow")
"""Actions after which the version before still serves; the others are `deploy`, `promote` and `rollback`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionReference:
    """A version of a model."""

    version: str
    """Of the registry, or the beginning of the digest where it is not registered."""
    digest: str

    def __str__(self) -> str:
        return self.version if self.digest.startswith(self.version) else f"{self.version} ({self.digest[:12]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentEvent:
    """One change of one deployment."""

    name: str
    action: str
    """`deploy`, `promote`, `rollback`, or one of `TRIALS`."""
    when: float
    """Seconds since the epoch."""
    who: str
    """`user@host`."""
    source: VersionReference | None
    """What served before; None where nothing did."""
    target: VersionReference
    """What serves since."""
    how: str
    """`started`, `swapped`, `beside`, `replaced` or `unchanged`."""
    seconds: float
    gates: Mapping[str, str] = field(default_factory=dict)
    """By metric: value, comparison, limit and verdict."""
    reason: str = ""
    application: str = ""
    """Of Ray Serve."""
    registered_model: str = ""
    """Name in the model registry; empty where the version is not registered."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`recorded_settings` of the target."""

    def as_json(self) -> dict[str, Any]:
        """What `read_event` reads again."""
        return asdict(self)


def read_event(given: Mapping[str, Any]) -> DeploymentEvent:
    """An event from JSON.

    Raises:
        TypeError: a field is missing or unknown.
        KeyError: likewise.
    """
    source = given["source"]
    return DeploymentEvent(
        **{
            **given,
            "source": None if source is None else VersionReference(**source),
            "target": VersionReference(**given["target"]),
        }
    )


def recorded_settings(settings: ReplicaSettings) -> dict[str, Any]:
    """Settings as an event keeps them: without who may ask, which is not part of a version."""
    return {name: value for name, value in asdict(settings).items() if name not in ACCESS_FIELDS}


def operator() -> str:
    """Who acts: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def append_event(store: Store, event: DeploymentEvent) -> str:
    """Write an event down for good; returns its key.

    Raises:
        StoreError: the store refuses.
    """
    moment = datetime.fromtimestamp(event.when, UTC)
    data = json.dumps(event.as_json(), indent=2, sort_keys=True).encode() + b"\n"
    while True:
        # The name sorts by time; the last part tells two events of one microsecond apart.
        key = f"{PREFIX}/{event.name}/events/{moment:%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(3)}.json"
        if store.create(key, data):
            return key


def deployment_names(store: Store) -> list[str]:
    """Every deployment that has a history."""
    return store.list(PREFIX)


def deployment_events(store: Store, name: str) -> list[DeploymentEvent]:
    """The history of a deployment, oldest first; empty where it has none.

    Raises:
        StoreError: an event cannot be read.
    """
    events = []
    for entry in store.list(f"{PREFIX}/{name}/events"):
        key = f"{PREFIX}/{name}/events/{entry}"
        try:
            events.append(read_event(json.loads(store.read(key) or b"")))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{key}: cannot be read as an event of a deployment: {error}",
                hint="it was damaged, or written by another version of this package; move it away",
            ) from error
    return events


def version_before(events: list[DeploymentEvent], *, current_digest: str) -> DeploymentEvent | None:
    """The event that brought what served before the version with this digest; None where nothing else ever did."""
    others = (event for event in reversed(events) if event.target.digest != current_digest)
    return next((event for event in others if event.action not in TRIALS), None)


def find_version(events: list[DeploymentEvent], version: str) -> list[DeploymentEvent]:
    """The newest event of each version of that name or with a digest that begins so."""
    found: dict[str, DeploymentEvent] = {}
    for event in events:
        if event.action in TRIALS:
            continue
        if event.target.version == version or (len(version) >= 4 and event.target.digest.startswith(version)):
            found[event.target.digest] = event
    return list(found.values())
