"""One run of a flow, from the file to the last word about it.

Owns what is around the runner: store, run id, lease, journal, tracker, the head, the report, and their ends in the
right order. The one decision: everything that can be known to be wrong is found before anything is started, and
whatever happens after, the journal and the tracker get the true status.
"""

import getpass
import importlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifacts.store import Store, open_store
from pipeline.cluster import head as local_head
from pipeline.cluster.capacity import planned_capacity
from pipeline.cluster.serve_environment import serve_environment
from pipeline.errors import LeaseError, ParameterError, UsageError
from pipeline.execution.backend import BACKENDS, Backend, Failure
from pipeline.execution.demand import check_devices, possible, why_impossible
from pipeline.execution.heartbeat import Heartbeat
from pipeline.execution.inline_backend import InlineBackend
from pipeline.execution.journal import Journal, RunRecord, read_run
from pipeline.execution.leases import Holder, Leases
from pipeline.execution.observer import Observer
from pipeline.execution.reading import Reading
from pipeline.execution.runner import RunEnd, Runner
from pipeline.execution.stage_run import RunScope
from pipeline.plan.graph import Flow
from pipeline.plan.resolved import resolved_text
from pipeline.tracking.protocol import Tracker
from pipeline.tracking.report import render_report
from pipeline.tracking.view import RunStatus, RunView

TRACKER_CLOSE_SECONDS = 30.0
REPORT_NAME = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a run differs from the default."""

    store_url: str
    state_directory: Path
    """Where the local head is noted; local even where the store is not."""
    address: str | None = None
    ephemeral: bool = False
    force: frozenset[str] = field(default_factory=frozenset)
    verbose: bool = False
    rerun_of: str | None = None
    backend: str = "ray"
    """Of `BACKENDS`; `inline` runs every stage in this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What the command has to say."""

    view: RunView
    failure: Failure | None
    report_path: Path | None


def new_run_id(*, now: float) -> str:
    """Sorts by time, and says the time."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{secrets.token_hex(2)}"


def run_flow(
    flow: Flow,
    *,
    options: RunOptions,
    make_tracker: Callable[[Store], Tracker],
    observer: Observer,
    is_interrupted: Callable[[], bool],
) -> RunResult:
    """Run a flow, or take up an earlier run of it.

    Raises:
        ParameterError, ClusterError: it can be known now that a stage cannot run here.
        StoreError: the store cannot be written.
        LeaseError: the run to take up is alive.
    """
    spec = flow.spec
    store = open_store(options.store_url)
    store.check_writable()
    if options.address is None:
        check_local(flow)
    unknown = options.force - {stage.name for stage in flow.stages}
    if unknown:
        names = ", ".join(stage.name for stage in flow.stages)
        raise UsageError(f"--force names {', '.join(sorted(unknown))}; the stages are: {names}")
    run_id = options.rerun_of or new_run_id(now=time.time())
    leases = Leases(store, holder=Holder.current(), clock=time.time)
    with Heartbeat(leases) as heartbeat:
        if heartbeat.acquire(f"runs/{run_id}") is None:
            newest = leases.newest(f"runs/{run_id}")
            holder = f"process {newest.holder.pid} on {newest.holder.host}" if newest else "another process"
            raise LeaseError(f"run {run_id} is alive: {holder} works on it", hint="wait for it, or stop that process")
        journal = Journal(store, run_id)
        if options.rerun_of is None:
            journal.begin(_record(flow, run_id=run_id, options=options))
        tracker = make_tracker(store)
        scope = RunScope(
            run_id=run_id,
            flow=spec.name,
            project_root=spec.project_root,
            ephemeral=options.ephemeral,
            store=store,
            journal=journal,
            tracker=tracker,
            observer=observer,
            heartbeat=heartbeat,
            environment=_environment(options),
        )
        return _run(flow, scope=scope, options=options, is_interrupted=is_interrupted)


def check_local(flow: Flow) -> None:
    """Refuse what this machine can never run.

    Raises:
        ParameterError: a device that is not here, or more of a resource than there is.
    """
    capacity = planned_capacity()
    stages = [possible(stage, capacity) for stage in flow.stages]
    check_devices(stages, capacity, where=lambda name: f"{flow.spec.stage(name).position('with.device')} ")
    lines = why_impossible(stages, capacity)
    if lines:
        raise ParameterError(
            "\n".join(lines), hint="lower `resources` in the flow, or run on a larger cluster (--address, --cluster)"
        )


def _run(
    flow: Flow,
    *,
    scope: RunScope,
    options: RunOptions,
    is_interrupted: Callable[[], bool],
) -> RunResult:
    scope.journal.run_event(RunStatus.RUNNING, time=time.time())
    view = read_run(scope.store, scope.run_id, series=False)
    scope.observer.run_started(view)
    scope.tracker.start_run(view)
    end: RunEnd | None = None
    error: BaseException | None = None
    try:
        end = _make_runner(flow, scope=scope, options=options, is_interrupted=is_interrupted).run()
    except BaseException as raised:
        error = raised
        raise
    finally:
        if options.ephemeral:
            local_head.stop_head(_head_directory(options, scope.run_id))
        result = _finish(scope, end=end, error=error)
    return result


def _make_runner(
    flow: Flow,
    *,
    scope: RunScope,
    options: RunOptions,
    is_interrupted: Callable[[], bool],
) -> Runner:
    reading = Reading(
        store=scope.store,
        flow=flow.spec.name,
        project_root=flow.spec.project_root,
        environment=scope.environment,
        hashes=True,
        force=options.force,
        registry=scope.tracker.registry,
    )
    return Runner(
        flow.stages,
        scope=scope,
        reading=reading,
        make_backend=lambda: _connect(options, scope.run_id),
        driver_backend=InlineBackend(registry=scope.tracker.registry),
        is_interrupted=is_interrupted,
        first_attempts={stage.name: _num_attempts(scope, stage.name) + 1 for stage in flow.stages},
    )


def _connect(options: RunOptions, run_id: str) -> Backend:
    if options.backend == "inline":
        return InlineBackend()
    address = options.address
    if address is None:
        directory = _head_directory(options, run_id)
        head = local_head.find_head(directory)
        if head is None:
            head = local_head.start_head(
                directory,
                num_cpus=len(os.sched_getaffinity(0)),
                environment=lambda private: serve_environment(directory=private),
                die_with_parent=options.ephemeral,
            )
        address = head.address
        os.environ.update(head.client_environment)  # read when the backend's module imports ray, just below
    module, _, name = BACKENDS[options.backend].partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)(address=address, verbose=options.verbose)
    return backend


def _head_directory(options: RunOptions, run_id: str) -> Path:
    return options.state_directory / "ephemeral" / run_id if options.ephemeral else options.state_directory


def _finish(scope: RunScope, *, end: RunEnd | None, error: BaseException | None) -> RunResult:
    status = RunStatus.FAILED if end is None else end.status
    failure = None if end is None else end.failure
    message = failure.message if failure else (str(error) if error else None)
    scope.journal.run_event(status, time=time.time(), error=message, tracking_gap=scope.tracker.gap)
    view = read_run(scope.store, scope.run_id, series=True)
    report_key = f"runs/{scope.run_id}/{REPORT_NAME}"
    scope.store.write(report_key, render_report(view).encode())
    report_path = scope.store.local_path(report_key) if scope.store.is_local else None
    scope.tracker.finish_run(view, report_path=report_path)
    scope.tracker.close(timeout_seconds=TRACKER_CLOSE_SECONDS)
    if scope.tracker.gap != view.tracking_gap:
        scope.journal.run_event(status, time=time.time(), error=message, tracking_gap=scope.tracker.gap)
        view = read_run(scope.store, scope.run_id, series=False)
    scope.observer.run_finished(view)
    return RunResult(view=view, failure=failure, report_path=report_path)


def _record(flow: Flow, *, run_id: str, options: RunOptions) -> RunRecord:
    spec = flow.spec
    return RunRecord(
        run_id=run_id,
        flow=spec.name,
        flow_file=str(spec.file),
        flow_text=spec.text,
        resolved_text=resolved_text(flow),
        overrides=spec.overrides,
        project_root=str(spec.project_root),
        parameters=dict(spec.params),
        host=socket.gethostname(),
        user=_user(),
        pid=os.getpid(),
        started_at=time.time(),
        ephemeral=options.ephemeral,
    )


def _environment(options: RunOptions) -> Mapping[str, str]:
    return {
        "ephemeral": "1" if options.ephemeral else "0",
        "store": options.store_url,
        "state_directory": str(options.state_directory),
    }


def _num_attempts(scope: RunScope, stage: str) -> int:
    numbers = [int(name) for name in scope.store.list(f"runs/{scope.run_id}/stages/{stage}") if name.isdigit()]
    return max(numbers, default=0)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not be in its password file
        return str(os.getuid())
