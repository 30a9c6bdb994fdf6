"""The row of the second start: how long a process takes to be ready with a filled compile cache and without.

Owns the two starts. The one decision: what counts is the whole start, from making the process to a warm engine:
interpreter, imports, reading parameters, compiling.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.diagnostics.bench_serve_contest import Contest, Group
from pipeline.diagnostics.bench_turns import Figures, Measure, RowSpec


def _sides(contest: Contest) -> Mapping[str, Measure]:
    cache = Path(tempfile.mkdtemp(prefix="compile-cache-", dir=contest.material.work))
    contest.stack.callback(shutil.rmtree, cache, ignore_errors=True)

    def start(_: int) -> Figures:
        started = time.perf_counter()
        with contest.fresh("ours_start") as side:
            side.ask("start", cache=str(cache))
            return {"seconds": time.perf_counter() - started}

    # In this order: the second finds what the first left.
    return {"ours": start, "first": start}


START = Group(
    name="start",
    sides=_sides,
    most_rounds=1,
    warm_up=False,
    rows=(
        RowSpec(
            name="second start, to a warm engine",
            unit="s",
            metric="seconds",
            peers={"first": "first start, empty compile cache"},
            bar=2.0,
            is_smaller_better=True,
        ),
    ),
)
