"""`pipeline runs`, `pipeline show` and `pipeline logs`: what is remembered of runs.

Owns their output. The one decision: all three read the journal in the store, never MLflow, so they work without it
and tell the truth about a run whose driver died.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from pipeline.artifacts.store import Store
from pipeline.cli.observers import ending
from pipeline.cli.place import Place, find_place
from pipeline.cli.text import duration, make_console, make_table, moment, number, print_json, styled
from pipeline.cli.trackers import make_tracker
from pipeline.errors import UsageError
from pipeline.execution.history import load_run, load_runs, match_run
from pipeline.execution.journal import attempt_key, read_reports
from pipeline.execution.leases import Holder, Leases
from pipeline.tracking.view import RunView

RECONCILE_SECONDS = 20.0


def runs(*, limit: int, store: str | None, as_json: bool) -> int:
    """List runs."""
    place = find_place(start=Path.cwd(), store=store)
    opened = place.open_store()
    crashed: list[RunView] = []
    views = load_runs(opened, leases=_leases(opened), now=time.time(), on_crash=crashed.append, limit=limit)
    if as_json:
        print_json([_summary(view) for view in views])
    else:
        _print_runs(views, opened)
    _reconcile(place, crashed)
    return 0


def show(*, run: str, store: str | None, as_json: bool) -> int:
    """Show one run."""
    place = find_place(start=Path.cwd(), store=store)
    opened = place.open_store()
    crashed: list[RunView] = []
    view = load_run(opened, run, leases=_leases(opened), now=time.time(), on_crash=crashed.append, series=False)
    if as_json:
        stages = [
            {key: value for key, value in asdict(stage).items() if key not in ("series", "figures")}
            for stage in view.stages
        ]
        print_json({**_summary(view), "parameters": dict(view.parameters), "stages": stages})
    else:
        _print_run(view, opened)
    _reconcile(place, crashed)
    return 0


def logs(*, run: str, stage: str, attempt: int | None, store: str | None, as_json: bool) -> int:
    """Print the notes and the output of one attempt."""
    opened = find_place(start=Path.cwd(), store=store).open_store()
    run_id = match_run(opened, run)
    numbers = sorted(int(name) for name in opened.list(f"runs/{run_id}/stages/{stage}") if name.isdigit())
    if not numbers or (attempt is not None and attempt not in numbers):
        stages = opened.list(f"runs/{run_id}/stages")
        found = (
            f"attempts: {', '.join(map(str, numbers))}"
            if numbers
            else f"stages that ran: {', '.join(stages) or 'none'}"
        )
        asked = f"stage {stage!r}" + (f" attempt {attempt}" if attempt else "")
        raise UsageError(
            f"run {run_id} has no log of {asked}; {found}", hint="a reused stage's log is with its producer"
        )
    chosen = attempt or numbers[-1]
    reports = read_reports(opened, run_id, stage, chosen)
    output = opened.read(f"{attempt_key(run_id, stage, chosen)}/output.log") or b""
    notes = [report for report in reports if report.kind == "note"]
    if as_json:
        print_json(
            {
                "run_id": run_id,
                "stage": stage,
                "attempt": chosen,
                "notes": [{"time": note.time, "text": note.payload["text"]} for note in notes],
                "output": output.decode(errors="replace"),
            }
        )
        return 0
    for note in notes:
        sys.stdout.write(f"{moment(note.time)} {note.payload['text']}\n")
    if output:
        sys.stdout.write(f"--- output of the stage's process ---\n{output.decode(errors='replace')}")
    return 0


def _leases(store: Store) -> Leases:
    return Leases(store, holder=Holder.current(), clock=time.time)


def _reconcile(place: Place, crashed: list[RunView]) -> None:
    """Tell MLflow too; only where a crash was found just now, for it costs seconds."""
    if not crashed:
        return
    tracker = make_tracker(place, no_tracking=False)
    for view in crashed:
        tracker.reconcile(view.run_id, view.status)
    tracker.close(timeout_seconds=RECONCILE_SECONDS)


def _summary(view: RunView) -> dict[str, object]:
    return {
        "run_id": view.run_id,
        "flow": view.flow,
        "status": view.status,
        "started_at": view.started_at,
        "ended_at": view.ended_at,
        "error": view.error,
        "host": view.host,
        "user": view.user,
        "num_reused": sum(stage.status == "REUSED" for stage in view.stages),
        "num_stages": len(view.stages),
        "tracking_gap": view.tracking_gap,
    }


def _print_runs(views: list[RunView], store: Store) -> None:
    console = make_console()
    if not views:
        console.print(f"no runs in {escape(store.url)}")
        return
    table = make_table()
    for title in ("run", "flow", "status", "started", "took", "stages", "error"):
        table.add_column(title, no_wrap=title != "error")
    for view in views:
        done = sum(stage.status in ("DONE", "REUSED") for stage in view.stages)
        took = duration((view.ended_at or time.time()) - view.started_at)
        error = (view.error or "").splitlines()
        table.add_row(
            view.run_id,
            escape(view.flow),
            styled(view.status),
            moment(view.started_at),
            took,
            f"{done}/{len(view.stages)}",
            escape(error[0] if error else ""),
        )
    console.print(table)


def _print_run(view: RunView, store: Store) -> None:
    console = make_console()
    took = duration((view.ended_at or time.time()) - view.started_at)
    console.print(f"run [bold]{view.run_id}[/] of flow [bold]{escape(view.flow)}[/]: {styled(view.status)} in {took}")
    console.print(f"started {moment(view.started_at)} by {escape(view.user)} on {escape(view.host)}")
    if view.parameters:
        console.print("parameters: " + ", ".join(f"{name}={escape(str(v))}" for name, v in view.parameters.items()))
    for stage in view.stages:
        console.print(
            f"\n[bold]{escape(stage.name)}[/] [dim]{stage.kind}[/] {styled(stage.status)} {escape(ending(stage))}"
        )
        if stage.fingerprint:
            producer = (
                f", computed by run {stage.producer_run_id}" if stage.producer_run_id not in (None, view.run_id) else ""
            )
            console.print(f"  [dim]fingerprint {stage.fingerprint[:16]}{producer}[/]")
        for attempt in stage.attempts:
            spent = duration((attempt.ended_at or time.time()) - attempt.started_at)
            error = f": {attempt.failure_class or ''} {attempt.error}" if attempt.error else ""
            console.print(f"  attempt {attempt.attempt} {styled(attempt.status)} in {spent}{escape(error)}")
        for hop in stage.hops:
            console.print(f"  fallback {escape(str(hop))}")
        for name, value in stage.metrics.items():
            console.print(f"  {escape(name)} = {number(value)}")
        for name, value in stage.facts.items():
            console.print(f"  [dim]{escape(name)}: {escape(str(value))}[/]")
    if view.error:
        console.print(f"\n[red]{escape(view.error)}[/]")
    if store.is_local:
        console.print(f"\nreport: {escape(str(store.local_path(f'runs/{view.run_id}/report.html')))}")
