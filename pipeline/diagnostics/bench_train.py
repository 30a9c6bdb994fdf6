"""`pipeline bench train`: the training loop against what else trains the same model, in one run.

Owns the order of the groups and which of them run. Knows nothing of how a group measures. The one decision: every row
is printed, and one that could not be measured says why and fails.
"""

import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.diagnostics import (
    bench_train_cluster,
    bench_train_memory,
    bench_train_recovery,
    bench_train_speed,
    bench_train_stall,
)
from pipeline.diagnostics.bench_result import BenchResult, BenchRow, machine_facts
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.errors import PipelineError, UsageError, nearest_name

GROUPS: Mapping[str, Callable[[Material], Measured]] = {
    "speed": bench_train_speed.measure,
    "stall": bench_train_stall.measure,
    "memory": bench_train_memory.measure,
    "recovery": bench_train_recovery.measure,
    "ray": bench_train_cluster.measure,
}
_PACKAGES = ("torch", "transformers", "accelerate", "lightning-fabric", "ray")


def run(
    *,
    rounds: int = 5,
    only: str = "",
    notice: Callable[[str], None] = lambda _: None,
    adapt: Callable[[Material], Material] = lambda material: material,
) -> BenchResult:
    """Measure every group that `only` names, on CPU ranks with one thread each.

    Args:
        rounds: measured rounds where sides take turns; the round of the median ratio counts.
        only: comma-separated patterns of groups; all where it is empty.
        notice: told which group begins and what it found.
        adapt: makes the bench smaller or larger.

    Raises:
        UsageError: no group matches `only`.
    """
    names = chosen(only)
    rows: list[BenchRow] = []
    details: list[Mapping[str, str]] = []
    machine = machine_facts() | {"rounds": rounds} | {name: _version(name) for name in _PACKAGES}
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as scratch:
        material = adapt(Material(work=Path(scratch), rounds=rounds, notice=notice))
        for name in names:
            notice(f"measuring {name}")
            made = _measured(name, material)
            rows += made.rows
            details += made.details
            for row in made.rows:
                notice(f"  {row.name}: {_told(row)}")
    return BenchResult(machine=machine, rows=tuple(rows), details=tuple(details))


def chosen(only: str) -> tuple[str, ...]:
    """The groups that a pattern names, in their order.

    Raises:
        UsageError: none.
    """
    patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()]
    names = tuple(name for name in GROUPS if not patterns or any(fnmatchcase(name, one) for one in patterns))
    if not names:
        nearest = nearest_name(only, list(GROUPS))
        raise UsageError(
            f"no rows are called {only!r}; there are: {', '.join(GROUPS)}",
            hint=f"did you mean {nearest!r}?" if nearest else "",
        )
    return names


def _measured(name: str, material: Material) -> Measured:
    try:
        return GROUPS[name](material)
    except Exception as error:  # the boundary of a group: what another library raises costs its rows and no others
        note = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        row = BenchRow(name=name, unit="-", ours=None, peer_name="-", peer=None, bar=1.0, note=note)
        return Measured(rows=(row,))


def _told(row: BenchRow) -> str:
    if row.ratio is None:
        return row.note or f"{row.peer_name} is not installed"
    return f"{row.ours:.4g} and {row.peer:.4g} {row.unit}, {row.peer_name}: {row.ratio:.3f}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
