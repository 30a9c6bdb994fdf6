"""`pipeline bench serve`: the serving engine against what else serves the same weights, in one run.

Owns the order of the groups and which of them run. Knows neither torch nor jax: each side is a process of its own, and
sides of a group take turns. The one decision: every row is printed, and one that could not be measured says why and
fails.
"""

from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.diagnostics import bench_serve_decode as decode
from pipeline.diagnostics import bench_serve_embeddings as embeddings
from pipeline.diagnostics import bench_serve_http as http
from pipeline.diagnostics import bench_serve_start as start
from pipeline.diagnostics.bench_result import BenchResult, BenchRow, machine_facts
from pipeline.diagnostics.bench_serve_contest import Contest, Group
from pipeline.diagnostics.bench_serve_material import Material
from pipeline.diagnostics.bench_serve_side import THREADS
from pipeline.diagnostics.bench_turns import make_row, take_turns
from pipeline.errors import UsageError, nearest_name

GROUPS: tuple[Group, ...] = (
    decode.ONE,
    decode.EIGHT,
    decode.PREFILL,
    http.COST,
    http.MANY,
    *embeddings.GROUPS,
    *decode.PRODUCTS,
    start.START,
    http.POISSON,
)
_GROUP_SECONDS = 60.0
"""After so long a group begins no further round: on a machine that does other work, too, the bench still ends."""
_PACKAGES = ("jax", "torch", "transformers", "onnxruntime", "llama_cpp_python")


def run(*, work: Path, rounds: int = 5, only: str = "", notice: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Measure every group that `only` names, in turns.

    Args:
        work: where models in the sides' formats are made and kept, about 2 GB, and what the sides print.
        rounds: measured rounds after one that warms up; long groups take fewer. The round of the median ratio counts.
        only: comma-separated patterns of groups; all where it is empty.
        notice: told which group begins.

    Raises:
        UsageError: no group matches `only`.
    """
    groups = chosen(only)
    work.mkdir(parents=True, exist_ok=True)
    rows: list[BenchRow] = []
    machine = machine_facts() | {"threads": THREADS, "rounds": rounds} | _versions()
    with ExitStack() as stack:
        contest = Contest(material=Material(work=work, notice=notice), stack=stack)
        for group in groups:
            notice(f"measuring {group.name}")
            measured = take_turns(
                group.sides(contest),
                rounds=min(rounds, group.most_rounds),
                warm_up=group.warm_up,
                most_seconds=_GROUP_SECONDS,
            )
            made = [make_row(spec, measured=measured) for spec in group.rows]
            rows += made
            for row in made:
                notice(f"  {row.name}: {_told(row)}")
    return BenchResult(machine=machine, rows=tuple(rows))


def chosen(only: str) -> tuple[Group, ...]:
    """The groups that a pattern names, in their order.

    Raises:
        UsageError: none.
    """
    patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()]
    groups = tuple(
        group for group in GROUPS if not patterns or any(fnmatchcase(group.name, pattern) for pattern in patterns)
    )
    if not groups:
        names = [group.name for group in GROUPS]
        nearest = nearest_name(only, names)
        raise UsageError(
            f"no rows are called {only!r}; there are: {', '.join(names)}",
            hint=f"did you mean {nearest!r}?" if nearest else "",
        )
    return groups


def _told(row: BenchRow) -> str:
    if row.ratio is None:
        return row.note
    return f"{row.ours:.4g} and {row.peer:.4g} {row.unit}, {row.peer_name}: {row.ratio:.3f}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
