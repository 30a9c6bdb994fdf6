"""`pipeline deployments`, `pipeline promote` and `pipeline rollback`: what serves, since when, and another version.

Owns their output and what a version may be called. The one decision: what runs is asked of the cluster, what happened
is read from the store, and a change is the same roll-out that a flow does, with the settings that serve now.
"""

import importlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from pipeline.artifacts.store import Store
from pipeline.cli.place import Place, find_place
from pipeline.cli.text import duration, make_console, make_table, moment, print_json
from pipeline.cli.trackers import deployment_registry, registered_source
from pipeline.cluster.head import find_head
from pipeline.errors import ClusterError, TrackingError, UsageError, nearest_name
from pipeline.serving.rollout.deployment_record import (
    TRIALS,
    DeploymentEvent,
    VersionReference,
    append_event,
    deployment_events,
    deployment_names,
    find_version,
    operator,
    recorded_settings,
    version_before,
)

RUNNING = "pipeline.stages.running_deployments"
"""By name: it loads ray, which reads from the environment how it is let in when it is loaded."""
CONNECTION = "pipeline.cluster.ray_connection"
TIMEOUT_SECONDS = 600.0
CHALLENGER = "challenger"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A version to go to."""

    version: str
    digest: str
    model_path: str
    registered_model: str
    gates: Mapping[str, str]


def deployments(
    *, name: str | None, store: str | None, address: str | None, cluster: Path | None, as_json: bool
) -> int:
    """List deployments, or the events of one."""
    place = find_place(start=Path.cwd(), store=store, address=address, cluster=cluster)
    opened = place.open_store()
    if name is not None:
        return _show_events(opened, name, as_json=as_json)
    rows: list[dict[str, Any]] = []
    where = _address(place)
    if where is not None:
        with _connected(where) as running:
            rows = running.deployment_rows()
    newest = {
        known: [event for event in deployment_events(opened, known) if event.action not in TRIALS][-1:]
        for known in deployment_names(opened)
    }
    for row in rows:
        events = newest.get(row["name"], [])
        same = bool(events) and events[0].target.digest == row["digest"]
        row["since"] = events[0].when if same else row["since"]
    shown = {row["name"] for row in rows}
    rows += [_stopped(events[0]) for known, events in newest.items() if known not in shown and events]
    if as_json:
        print_json(rows)
    else:
        _print_rows(rows, where=where, store=opened)
    return 0


def promote(
    *,
    name: str,
    version: str,
    reason: str,
    store: str | None,
    address: str | None,
    cluster: Path | None,
    as_json: bool,
) -> int:
    """Serve another version."""
    place = find_place(start=Path.cwd(), store=store, address=address, cluster=cluster)
    opened = place.open_store()
    with _connected(_needed_address(place)) as running:
        current = running.current(name)
        events = deployment_events(opened, name)
        if version == CHALLENGER:
            target = _challenger(running, name, events)
        else:
            target = _find(place, name, version, events=events)
        return _change(
            running, place, opened, name=name, current=current, target=target, action="promote", reason=reason,
            as_json=as_json,
        )  # fmt: skip


def rollback(
    *,
    name: str,
    to: str | None,
    reason: str,
    store: str | None,
    address: str | None,
    cluster: Path | None,
    as_json: bool,
) -> int:
    """Serve the version before, or the one that is named."""
    place = find_place(start=Path.cwd(), store=store, address=address, cluster=cluster)
    opened = place.open_store()
    with _connected(_needed_address(place)) as running:
        current = running.current(name)
        events = deployment_events(opened, name)
        if to is not None:
            target = _find(place, name, to, events=events)
        else:
            before = version_before(events, current_digest=current.digest)
            if before is None:
                raise UsageError(
                    f"deployment {name!r} never served another version than {current.version}",
                    hint="see `pipeline deployments " + name + "`; another version is promoted with `pipeline promote`",
                )
            target = _target_of(before)
        return _change(
            running, place, opened, name=name, current=current, target=target, action="rollback", reason=reason,
            as_json=as_json,
        )  # fmt: skip


def _change(
    running: Any,
    place: Place,
    store: Store,
    *,
    name: str,
    current: Any,
    target: _Target,
    action: str,
    reason: str,
    as_json: bool,
) -> int:
    console = make_console(stderr=as_json)
    if target.digest == current.digest:
        raise UsageError(f"deployment {name!r} serves version {target.version} ({target.digest[:12]}) already")
    settings = replace(
        current,
        model_path=target.model_path,
        digest=target.digest,
        version=target.version,
        deployment_id=uuid.uuid4().hex,
    )
    note = lambda text: console.print(escape(text))  # noqa: E731
    brought = running.bring_again(settings, deadline=time.monotonic() + TIMEOUT_SECONDS, note=note)
    event = DeploymentEvent(
        name=name,
        action=action,
        when=time.time(),
        who=operator(),
        source=VersionReference(version=current.version, digest=current.digest),
        target=VersionReference(version=target.version, digest=target.digest),
        how=brought.roll_out.how,
        seconds=round(brought.roll_out.seconds, 3),
        gates=target.gates,
        reason=reason,
        application=brought.application,
        registered_model=target.registered_model,
        settings=recorded_settings(settings),
    )
    append_event(store, event)
    if event.registered_model:
        deployment_registry(place).record_deployment(asdict(event))
    if as_json:
        print_json({**asdict(event), "url": f"{brought.endpoint.url}/v1"})
    else:
        console.print(f"{escape(name)}: {escape(str(event.source))} -> {escape(str(event.target))}")
        console.print(f"try it:   {escape(brought.answer.curl)}")
        back = "pipeline rollback " + name
        console.print(f"go back:  {escape(back)}")
    return 0


def _find(place: Place, name: str, version: str, *, events: list[DeploymentEvent]) -> _Target:
    """The version in the history of the deployment, else in the model registry."""
    found = find_version(events, version)
    if len(found) == 1:
        return _target_of(found[0])
    if len(found) > 1:
        several = ", ".join(str(event.target) for event in found)
        raise UsageError(f"{version!r} may be {several}", hint="give more of its digest")
    registered = next((event.registered_model for event in reversed(events) if event.registered_model), name)
    try:
        known = deployment_registry(place).find_version(registered, version)
    except TrackingError as error:
        known, looked = None, f"the model registry could not be asked: {error.message}"
    else:
        looked = f"the model registry has no version {version!r} of {registered!r}"
    if known is None:
        served = sorted({event.target.version for event in events})
        hint = f"it has served: {', '.join(served) or 'nothing'}; {looked}"
        near = nearest_name(version, served)
        raise UsageError(
            f"deployment {name!r} knows no version {version!r}" + (f"; {near!r}?" if near else ""), hint=hint
        )
    path = registered_source(place, f"models:/{registered}/{known['version']}").removeprefix("file://")
    if "://" in path:
        raise UsageError(
            f"version {version!r} of {registered!r} lies at {path}, where replicas cannot read it",
            hint="name it as the model of a flow's deploy.serve, which brings it to the nodes",
        )
    return _Target(
        version=known["version"],
        digest=known["digest"],
        model_path=path,
        registered_model=registered,
        gates=known["gates"],
    )


def _target_of(event: DeploymentEvent) -> _Target:
    return _Target(
        version=event.target.version,
        digest=event.target.digest,
        model_path=str(event.settings["model_path"]),
        registered_model=event.registered_model,
        gates=event.gates,
    )


def _challenger(running: Any, name: str, events: list[DeploymentEvent]) -> _Target:
    settings = running.challenger(name)
    registered = next((event.registered_model for event in reversed(events) if event.registered_model), "")
    return _Target(
        version=settings.version,
        digest=settings.digest,
        model_path=settings.model_path,
        registered_model=registered if settings.version.isdigit() else "",
        gates={},
    )


def _show_events(store: Store, name: str, *, as_json: bool) -> int:
    events = deployment_events(store, name)
    if not events:
        known = deployment_names(store)
        near = nearest_name(name, known)
        raise UsageError(
            f"no deployment {name!r} was ever made with this store" + (f"; did you mean {near!r}?" if near else ""),
            hint=f"there are: {', '.join(known) or 'none'}",
        )
    if as_json:
        print_json([asdict(event) for event in events])
        return 0
    table = make_table()
    for title in ("when", "who", "action", "from", "to", "how", "took", "gates", "reason"):
        table.add_column(title, no_wrap=title not in ("gates", "reason"))
    for event in events:
        table.add_row(
            moment(event.when),
            escape(event.who),
            event.action,
            escape(str(event.source or "-")),
            escape(str(event.target)),
            event.how,
            duration(event.seconds),
            escape("; ".join(f"{metric} {verdict}" for metric, verdict in event.gates.items())),
            escape(event.reason),
        )
    make_console().print(table)
    return 0


def _print_rows(rows: list[dict[str, Any]], *, where: str | None, store: Store) -> None:
    console = make_console()
    if not rows:
        console.print(f"no deployments: nothing serves and {escape(store.url)} remembers none")
        return
    table = make_table()
    for title in ("name", "version", "digest", "since", "replicas", "endpoint", "health", "traffic"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["name"]),
            escape(row["version"]),
            row["digest"][:12],
            moment(row["since"]),
            f"{row['running']}/{row['replicas']}",
            escape(row["endpoint"] or "-"),
            escape(row["health"]),
            escape(row["traffic"]),
        )
    console.print(table)
    if where is None:
        console.print("no local head runs; `pipeline run` starts one, `--address` names another cluster")


def _stopped(event: DeploymentEvent) -> dict[str, Any]:
    return {
        "name": event.name,
        "application": event.application,
        "version": event.target.version,
        "digest": event.target.digest,
        "since": event.when,
        "running": 0,
        "replicas": 0,
        "endpoint": "",
        "health": "stopped",
        "traffic": "-",
    }


def _address(place: Place) -> str | None:
    """Of the cluster that was named, or of this project's local head; the environment is made ready to be let in."""
    if place.address is not None:
        return place.address
    head = find_head(place.state_directory)
    if head is None:
        return None
    os.environ.update(head.client_environment)
    return head.address


def _needed_address(place: Place) -> str:
    address = _address(place)
    if address is None:
        raise ClusterError(
            f"nothing runs: no local head is noted in {place.state_directory}",
            hint="start the deployment with `pipeline run`, or name its cluster with --address",
        )
    return address


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    connection = importlib.import_module(CONNECTION)
    connection.connect(address, verbose=False)
    try:
        yield importlib.import_module(RUNNING)
    finally:
        connection.disconnect()
