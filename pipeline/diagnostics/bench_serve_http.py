"""Rows through HTTP: what the surface costs, and requests that arrive by themselves.

Owns what the clients send. The one decision: both sides answer behind uvicorn and starlette, and the client runs in the
bench's own process, on the same cores, for both alike.
"""

import statistics
from collections.abc import Mapping

from pipeline.diagnostics.bench_serve_contest import Contest, Group
from pipeline.diagnostics.bench_serve_traffic import Arrival, poisson_arrivals, replay, summarize
from pipeline.diagnostics.bench_turns import Figures, Measure, RowSpec

MODEL = "bench"
_ALLOWED_MS = 3.0
_PAIRS = 20
_SHORT = 12
_MANY = 64
_MANY_NEW_TOKENS = 8
_REQUESTS = 200
_PER_SECOND = 12.0
"""More than any side serves: at a rate that one keeps up with, its throughput would be the arrivals'."""
_PROMPT_TOKENS = (8, 96)
_NEW_TOKENS = (4, 24)


def _cost_sides(contest: Contest) -> Mapping[str, Measure]:
    def ours(number: int) -> Figures:
        inside, outside = [], []
        for pair in range(_PAIRS):
            one, two = contest.material.prompts(_SHORT, _SHORT, seed=1000 * number + pair)
            # In turns, and each time with a prompt that no cache has.
            inside.append(contest.ask("ours", "generate", prompts=[one], num_tokens=1)["first_seconds"])
            arrival = Arrival(at_seconds=0.0, prompt=tuple(two), max_tokens=1)
            outside.append(replay([arrival], port=contest.port("ours"), model=MODEL)[0].first_seconds)
        return {"http_ms": 1e3 * statistics.mean(outside), "inside_ms": 1e3 * statistics.mean(inside)}

    return {"ours": ours}


def _many_sides(contest: Contest) -> Mapping[str, Measure]:
    def ours(number: int) -> Figures:
        lengths = (_SHORT,) * _MANY
        prompts = contest.material.prompts(*lengths, seed=2 * number)
        others = contest.material.prompts(*lengths, seed=2 * number + 1)
        inside = contest.ask("ours", "generate", prompts=prompts, num_tokens=_MANY_NEW_TOKENS)
        arrivals = [Arrival(at_seconds=0.0, prompt=tuple(one), max_tokens=_MANY_NEW_TOKENS) for one in others]
        seen = replay(arrivals, port=contest.port("ours"), model=MODEL)
        return {
            "inside": inside["tokens_per_second"],
            "http": summarize(seen, arrivals=arrivals)["tokens_per_second"],
        }

    return {"ours": ours}


def _poisson_sides(contest: Contest) -> Mapping[str, Measure]:
    arrivals = poisson_arrivals(
        _REQUESTS, per_second=_PER_SECOND, prompt_tokens=_PROMPT_TOKENS, new_tokens=_NEW_TOKENS, seed=0
    )
    first = poisson_arrivals(4, per_second=_PER_SECOND, prompt_tokens=_PROMPT_TOKENS, new_tokens=(4, 8), seed=1)

    def measure(kind: str) -> Measure:
        def measured(_: int) -> Figures:
            port = contest.port(kind)
            replay(first, port=port, model=MODEL)
            return summarize(replay(arrivals, port=port, model=MODEL), arrivals=arrivals)

        return measured

    return {kind: measure(kind) for kind in ("ours", "transformers")}


COST = Group(
    name="http",
    sides=_cost_sides,
    rows=(
        RowSpec(
            name="HTTP, first token over calling the engine, 1 client",
            unit="ms",
            metric="http_ms",
            peer_metric="inside_ms",
            peers={"ours": "allowed"},
            allowed=_ALLOWED_MS,
            bar=1.0,
            is_smaller_better=True,
        ),
    ),
)
MANY = Group(
    name="http-64",
    sides=_many_sides,
    most_rounds=2,
    rows=(
        RowSpec(
            name="HTTP, 64 clients at once",
            unit="tokens/s",
            metric="http",
            peer_metric="inside",
            peers={"ours": "calling the engine"},
            bar=0.95,
        ),
    ),
)
_PEER = {"transformers": "transformers continuous batching"}
POISSON = Group(
    name="poisson",
    sides=_poisson_sides,
    most_rounds=1,
    warm_up=False,
    rows=(
        RowSpec(
            name=f"Poisson arrivals, {_REQUESTS} requests",
            unit="tokens/s",
            metric="tokens_per_second",
            peers=_PEER,
            bar=2.0,
        ),
        RowSpec(
            name=f"Poisson arrivals, {_REQUESTS} requests, p99 to the first token",
            unit="s",
            metric="p99_first_seconds",
            peers=_PEER,
            bar=2.0,
            is_smaller_better=True,
        ),
    ),
)
