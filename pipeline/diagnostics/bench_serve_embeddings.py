"""Rows of embeddings: all-MiniLM-L6-v2, from text to vectors.

Owns the batches. The one decision: a batch counts only where its vectors are those of the peers.
"""

from collections.abc import Callable, Mapping

from pipeline.diagnostics.bench_serve_contest import Contest, Group
from pipeline.diagnostics.bench_turns import Figures, Measure, RowSpec
from pipeline.errors import StageError

_BATCHES = (1, 8, 64)
_REPEATS = {1: 24, 8: 6, 64: 2}
"""Calls in a round: each of these lasts about a second."""
_PEERS = (
    ("torch_embeddings", "torch, as sentence-transformers", 1.5),
    ("onnxruntime", "onnxruntime", 1.0),
)
_TOLERANCE = 1e-4
"""Numbers of a vector of length 1; 1e-6 measured."""


def _sides(num_rows: int) -> Callable[[Contest], Mapping[str, Measure]]:
    def sides(contest: Contest) -> Mapping[str, Measure]:
        firsts: dict[int, tuple[str, list[float]]] = {}

        def measure(kind: str) -> Measure:
            def measured(number: int) -> Figures:
                seconds = 0.0
                for repeat in range(_REPEATS[num_rows]):
                    seed = number * 1000 + repeat
                    made = contest.ask(kind, "embed", texts=contest.material.texts(num_rows, seed=seed))
                    other, expected = firsts.setdefault(seed, (kind, made["first"]))
                    if any(abs(a - b) > _TOLERANCE for a, b in zip(made["first"], expected, strict=True)):
                        raise StageError(f"{made['first']} is not what {other} gave: {expected}")
                    seconds += made["seconds"]
                return {"texts_per_second": num_rows * _REPEATS[num_rows] / seconds}

            return measured

        return {"ours": measure("ours_embeddings"), **{kind: measure(kind) for kind, *_ in _PEERS}}

    return sides


GROUPS = tuple(
    Group(
        name=f"embeddings-{num_rows}",
        sides=_sides(num_rows),
        rows=tuple(
            RowSpec(
                name=f"embeddings, {num_rows} at once, {kind.partition('_')[0]}",
                unit="texts/s",
                metric="texts_per_second",
                peers={kind: shown},
                bar=bar,
            )
            for kind, shown, bar in _PEERS
        ),
    )
    for num_rows in _BATCHES
)
