"""`pipeline bench NAME`: ours and its peers, measured side by side.

Owns the table of benches and how their rows are shown, logged and judged. The one decision: a row below its bar makes
the command fail (exit code 1), and a peer that is not installed is a row that says so, never a pass.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline.cli.place import find_place
from pipeline.cli.text import make_console, number, print_json
from pipeline.cli.trackers import default_tracking_uri
from pipeline.errors import UsageError, nearest_name

BENCHES: Mapping[str, str] = {"train": "pipeline.diagnostics.bench_train:run"}
BENCH_LOG = "pipeline.tracking.mlflow_bench:log_bench"


def bench(*, name: str, rounds: int, store: str | None, as_json: bool, no_tracking: bool) -> int:
    """Run a bench; 0 where every row reaches its bar, 1 where one does not."""
    if name not in BENCHES:
        nearest = nearest_name(name, list(BENCHES))
        raise UsageError(
            f"no bench {name!r}; there are: {', '.join(BENCHES)}", hint=f"did you mean {nearest!r}?" if nearest else ""
        )
    result = _load(BENCHES[name])(rounds=rounds)
    value = result.to_json()
    if as_json:
        print_json(value)
    else:
        _print(value)
    if not no_tracking:
        place = find_place(start=Path.cwd(), store=store)
        root = None if place.tracking_uri else str(place.state_directory / "mlflow-artifacts")
        place.state_directory.mkdir(parents=True, exist_ok=True)
        _load(BENCH_LOG)(default_tracking_uri(place), artifact_root=root, name=name, result=value)
    return 0 if all(row["ok"] for row in value["rows"]) else 1


def _print(value: Mapping[str, Any]) -> None:
    console = make_console()
    console.print("machine: " + ", ".join(f"{key} {item}" for key, item in value["machine"].items()))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("row", "unit", "ours", "peer", "its figure", "ratio", "bar", ""):
        table.add_column(title, justify="left" if title in ("row", "unit", "peer", "") else "right")
    for row in value["rows"]:
        table.add_row(
            row["name"],
            row["unit"],
            number(row["ours"]),
            row["peer_name"],
            "not installed" if row["peer"] is None else number(row["peer"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{row['bar']:.2f}",
            "[green]ok[/]" if row["ok"] else "[red]below the bar[/]",
        )
    console.print(table)


def _load(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
