"""Sides that take turns, and the rows that are made of their figures.

Owns the order of measuring and the arithmetic of the rows. Pure but for the clock of whoever is called; knows no model.
The one decision: a row is the round whose ratio is the median, because whatever else the machine does meets both sides
of a round; and a side that fails takes its rows with it and no others.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.diagnostics.bench_result import BenchRow
from pipeline.errors import PipelineError

Figures = Mapping[str, float]
"""What one side measured in one round, by metric."""
Measure = Callable[[int], Figures]
"""Given the number of the round, so that both sides of one get the same prompts and no two rounds do."""
Rounds = Sequence[Figures] | str
"""Of one side, or why there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpec:
    """A row before it is measured."""

    name: str
    unit: str
    metric: str
    peers: Mapping[str, str]
    """Side to the name that is shown; of several, the fastest counts."""
    bar: float | None
    ours: str = "ours"
    is_smaller_better: bool = False
    allowed: float | None = None
    """Where given, the row holds ours less the peer against this number."""
    peer_metric: str = ""
    """`metric` where empty."""


def take_turns(
    sides: Mapping[str, Measure],
    *,
    rounds: int,
    warm_up: bool = True,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Rounds]:
    """Ask every side once a round, in an order that turns; the first round, of warm-up, does not count.

    After `most_seconds` no round begins, but one is always measured.
    """
    started = clock()
    figures: dict[str, list[Figures]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(rounds + warm_up):
        if number > warm_up and clock() - started > most_seconds:
            break
        order = list(sides)[:: 1 if number % 2 else -1]
        for name in order:
            if name in failed:
                continue
            try:
                figures[name].append(sides[name](number))
            except PipelineError as error:
                failed[name] = str(error)
    return {name: failed.get(name, figures[name][warm_up:]) for name in sides}


def make_row(spec: RowSpec, *, measured: Mapping[str, Rounds]) -> BenchRow:
    """The row of what was measured; without figures where a side has none."""
    ours = measured.get(spec.ours, "was not measured")
    if isinstance(ours, str):
        return _unmeasured(spec, why=f"{spec.ours}: {ours}")
    faults: list[str] = []
    rows: list[BenchRow] = []
    for side, shown in spec.peers.items():
        theirs = measured.get(side, "was not measured")
        if isinstance(theirs, str):
            faults.append(f"{side}: {theirs}")
        else:
            rows.append(_median(spec, ours=ours, theirs=theirs, peer_name=shown))
    if not rows:
        return _unmeasured(spec, why="; ".join(faults), ours=statistics.median(item[spec.metric] for item in ours))
    hardest = min(rows, key=lambda row: row.ratio or 0.0)
    # Of several peers the bar is against the fastest, so one that could not run leaves the row open to doubt.
    return replace(hardest, note="; ".join(faults))


def _median(spec: RowSpec, *, ours: Sequence[Figures], theirs: Sequence[Figures], peer_name: str) -> BenchRow:
    their_metric = spec.peer_metric or spec.metric
    rows = [
        _one(spec, mine[spec.metric], their[their_metric], peer_name) for mine, their in zip(ours, theirs, strict=True)
    ]
    return sorted(rows, key=lambda row: row.ratio or 0.0)[(len(rows) - 1) // 2]


def _one(spec: RowSpec, mine: float, their: float, peer_name: str) -> BenchRow:
    if spec.allowed is not None:
        mine, their = max(mine - their, spec.allowed / 1000), spec.allowed
    return BenchRow(
        name=spec.name,
        unit=spec.unit,
        ours=mine,
        peer_name=peer_name,
        peer=their,
        bar=spec.bar,
        is_smaller_better=spec.is_smaller_better,
    )


def _unmeasured(spec: RowSpec, *, why: str, ours: float | None = None) -> BenchRow:
    return BenchRow(
        name=spec.name,
        unit=spec.unit,
        ours=ours,
        peer_name=" or ".join(spec.peers.values()),
        peer=None,
        bar=spec.bar,
        is_smaller_better=spec.is_smaller_better,
        note=why,
    )
