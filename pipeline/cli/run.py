"""`pipeline run` and `pipeline rerun`.

Owns what these verbs print at the end, and Ctrl-C. The one decision: the first Ctrl-C (or SIGTERM) ends the run in
order, with the true status everywhere; the second one ends the process.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape

from pipeline.artifacts.store import Store
from pipeline.cli.observers import make_observer
from pipeline.cli.place import Place, find_place
from pipeline.cli.text import duration, make_console, styled
from pipeline.cli.trackers import make_tracker
from pipeline.errors import EXIT_CODE_BY_CLASS, EXIT_CODE_INTERRUPTED, Interrupted, StageError
from pipeline.execution.driver import RunOptions, RunResult, run_flow
from pipeline.execution.history import match_run
from pipeline.execution.journal import read_record
from pipeline.plan.graph import Flow, open_flow, open_flow_text
from pipeline.tracking.protocol import Tracker
from pipeline.tracking.view import RunStatus


def run(
    *,
    flow_path: Path,
    overrides: list[str],
    store: str | None,
    address: str | None,
    cluster: Path | None,
    ephemeral: bool,
    force: list[str],
    no_tracking: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Run a flow."""
    flow = open_flow(flow_path, overrides=overrides)
    place = find_place(start=flow.spec.file.parent, store=store, address=address, cluster=cluster)
    options = RunOptions(
        store_url=place.store_url,
        state_directory=place.state_directory,
        address=place.address,
        ephemeral=ephemeral,
        force=frozenset(force),
        verbose=verbose,
    )
    return _run(flow, place=place, options=options, no_tracking=no_tracking, as_json=as_json)


def rerun(
    *,
    run: str,
    store: str | None,
    address: str | None,
    cluster: Path | None,
    ephemeral: bool,
    no_tracking: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Take up an earlier run under the same id, with the flow as it was then."""
    place = find_place(start=Path.cwd(), store=store, address=address, cluster=cluster)
    opened = place.open_store()
    record = read_record(opened, match_run(opened, run))
    flow = open_flow_text(record.flow_text, file=Path(record.flow_file), overrides=record.overrides)
    options = RunOptions(
        store_url=place.store_url,
        state_directory=place.state_directory,
        address=place.address,
        ephemeral=ephemeral or record.ephemeral,
        verbose=verbose,
        rerun_of=record.run_id,
    )
    return _run(flow, place=place, options=options, no_tracking=no_tracking, as_json=as_json)


def run_to_end(flow: Flow, *, place: Place) -> None:
    """Run a part of a flow for another verb, in this process: no cluster is started.

    Raises:
        PipelineError: a stage failed.
    """
    options = RunOptions(
        store_url=place.store_url, state_directory=place.state_directory, ephemeral=True, backend="inline"
    )
    result = _watched(flow, place=place, options=options, no_tracking=True, as_json=False)
    if result.view.status is RunStatus.INTERRUPTED:
        raise Interrupted("interrupted")
    if result.failure is not None:
        raise StageError(result.failure.message)


def _run(flow: Flow, *, place: Place, options: RunOptions, no_tracking: bool, as_json: bool) -> int:
    _log_to_file(place.state_directory, verbose=options.verbose)
    result = _watched(flow, place=place, options=options, no_tracking=no_tracking, as_json=as_json)
    if not as_json:
        _say_end(result, options=options)
    return _exit_code(result)


def _watched(flow: Flow, *, place: Place, options: RunOptions, no_tracking: bool, as_json: bool) -> RunResult:
    """Run with the live view, until it ends or is interrupted."""
    observer = make_observer(as_json=as_json)
    try:
        with _interrupts() as is_interrupted:
            return run_flow(
                flow,
                options=options,
                make_tracker=_tracker_maker(place, no_tracking=no_tracking),
                observer=observer,
                is_interrupted=is_interrupted,
            )
    finally:
        observer.close()


def _log_to_file(directory: Path, *, verbose: bool) -> None:
    """Log lines of libraries and of the tracker go to a file, so that they do not break into the live view."""
    handlers: list[logging.Handler] = [logging.NullHandler()]
    with contextlib.suppress(OSError):  # a store that cannot be written is told by the store itself, better
        directory.mkdir(parents=True, exist_ok=True)
        handlers = [logging.FileHandler(directory / "driver.log", delay=True)]
    if verbose:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def _tracker_maker(place: Place, *, no_tracking: bool) -> Callable[[Store], Tracker]:
    return lambda _: make_tracker(place, no_tracking=no_tracking)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    asked = threading.Event()

    def handle(number: int, _: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit_code(result: RunResult) -> int:
    if result.view.status is RunStatus.INTERRUPTED:
        return EXIT_CODE_INTERRUPTED
    return 0 if result.failure is None else EXIT_CODE_BY_CLASS[result.failure.failure_class]


def _say_end(result: RunResult, *, options: RunOptions) -> None:
    console = make_console()
    view = result.view
    took = duration((view.ended_at or view.started_at) - view.started_at)
    console.print(f"\nrun {view.run_id}: {styled(view.status)} in {took}")
    if result.failure is not None:
        make_console(stderr=True).print(f"[red]error:[/] {escape(result.failure.message)}")
    if result.report_path is not None:
        console.print(f"report:   {escape(str(result.report_path))}")
    console.print("lineage:  pipeline ui")
    if view.tracking_gap:
        console.print(f"[yellow]tracking: {view.tracking_gap} calls to MLflow were lost; the journal has them all[/]")
    if view.status is not RunStatus.DONE:
        console.print(f"details:  pipeline show {view.run_id}; go on with: pipeline rerun {view.run_id}")
    elif not options.ephemeral:
        for stage in view.stages:
            if "url" in stage.facts:
                console.print(f"serving:  {escape(str(stage.facts['url']))}")
                console.print(f"try:      {escape(str(stage.facts.get('curl', '')))}", soft_wrap=True)
                console.print("stop:     pipeline down")
