"""`pipeline bench NAME`: ours and its peers, measured side by side.

Owns the table of benches and how their rows are shown, logged and judged. The one decision: a row below its bar makes
the command fail (exit code 1), and a peer that is not installed is a row that says so, never a pass.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.cli.place import find_place
from pipeline.cli.text import make_console, make_table, number, print_json
from pipeline.cli.trackers import default_tracking_uri
from pipeline.errors import UsageError, nearest_name

BENCHES: Mapping[str, str] = {
    "train": "pipeline.diagnostics.bench_train:run",
    "trace": "pipeline.diagnostics.bench_trace:run",
    "convert": "pipeline.diagnostics.bench_convert:run",
    "serve": "pipeline.diagnostics.bench_serve:run",
}
BENCH_LOG = "pipeline.tracking.mlflow_bench:log_bench"


def bench(
    *,
    name: str,
    rounds: int,
    store: str | None,
    as_json: bool,
    no_tracking: bool,
    only: str = "",
    jobs: int | None = None,
    update_docs: bool = False,
) -> int:
    """Run a bench; 0 where every row reaches its bar, 1 where one does not.

    Raises:
        UsageError: there is no such bench, or it has no such option.
    """
    if name not in BENCHES:
        nearest = nearest_name(name, list(BENCHES))
        raise UsageError(
            f"no bench {name!r}; there are: {', '.join(BENCHES)}", hint=f"did you mean {nearest!r}?" if nearest else ""
        )
    place = find_place(start=Path.cwd(), store=store)
    run = _load(BENCHES[name])
    asked = {"only": only, "jobs": jobs, "update_docs": update_docs}
    offered = {"rounds": rounds, "work": place.state_directory / f"bench-{name}", "notice": _notice}
    result = run(
        **_options(run, name=name, asked={key: value for key, value in asked.items() if value}, offered=offered)
    )
    value = result.to_json()
    if as_json:
        print_json(value)
    else:
        _print(value)
    if not no_tracking:
        root = None if place.tracking_uri else str(place.state_directory / "mlflow-artifacts")
        place.state_directory.mkdir(parents=True, exist_ok=True)
        _load(BENCH_LOG)(default_tracking_uri(place), artifact_root=root, name=name, result=value)
    return 0 if all(row["ok"] for row in value["rows"]) else 1


def _options(
    run: Callable[..., Any], *, name: str, asked: Mapping[str, Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """What the bench is called with: all that was asked for, and of what is offered what it takes."""
    taken = inspect.signature(run).parameters
    refused = [f"--{key.replace('_', '-')}" for key in asked if key not in taken]
    if refused:
        raise UsageError(
            f"bench {name} has no {', '.join(refused)}",
            hint="see `pipeline bench --help`",
        )
    return {key: value for key, value in {**offered, **asked}.items() if key in taken}


def _notice(text: str) -> None:
    make_console(stderr=True).print(text, markup=False)


def _print(value: Mapping[str, Any]) -> None:
    console = make_console()
    if value.get("details"):
        console.print(_details(value["details"]))
    console.print("machine: " + ", ".join(f"{key} {item}" for key, item in value["machine"].items()))
    table = make_table()
    for title in ("row", "unit", "ours", "peer", "its figure", "ratio", "bar", ""):
        table.add_column(title, justify="left" if title in ("row", "unit", "peer", "") else "right")
    for row in value["rows"]:
        table.add_row(
            row["name"],
            row["unit"],
            "-" if row["ours"] is None else number(row["ours"]),
            row["peer_name"],
            _missing(row) if row["peer"] is None else number(row["peer"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "-" if row["bar"] is None else f"{row['bar']:.2f}",
            _verdict(row),
        )
    console.print(table)
    for row in value["rows"]:
        if row["note"]:
            console.print(f"{row['name']}: {row['note']}", markup=False)


def _verdict(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "[red]not measured[/]"
    return "[green]ok[/]" if row["ok"] else "[red]below the bar[/]"


def _missing(row: Mapping[str, Any]) -> str:
    return "none" if row["note"] else "not installed"


def _details(items: Sequence[Mapping[str, str]]) -> Table:
    table = make_table()
    for title in items[0]:
        table.add_column(title)
    for item in items:
        table.add_row(*(Text(cell) for cell in item.values()))
    return table


def _load(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
