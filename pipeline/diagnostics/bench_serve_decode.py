"""Rows of decoding and prefill.

Owns what a row of SmolLM2-135M is asked and which figure counts. The one decision: one request is timed from its first
to its last token, so that prefill has a row of its own; eight at once are timed from submission to the last token of
all, because continuous batching has no other beginning.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.diagnostics.bench_serve_contest import Contest, Group
from pipeline.diagnostics.bench_turns import Figures, Measure, RowSpec

_PROMPT_TOKENS = 16
_NEW_TOKENS = 48
_EIGHT_PROMPTS = (8, 12, 16, 20, 24, 28, 32, 40)
_EIGHT_NEW_TOKENS = 24
_PREFILL_TOKENS = 512


def _asked(contest: Contest, kind: str, question: str, lengths: tuple[int, ...], num_tokens: int) -> Measure:
    def measure(number: int) -> Figures:
        prompts = contest.material.prompts(*lengths, seed=number)
        value: Mapping[str, Any] = contest.ask(kind, question, prompts=prompts, num_tokens=num_tokens)
        return value

    return measure


def _one_sides(contest: Contest) -> Mapping[str, Measure]:
    def bandwidth(_: int) -> Figures:
        rate = contest.ask("ours", "bandwidth") * 1e9 / contest.ask("ours", "bytes_a_token")
        return {"decode_tokens_per_second": rate}

    sides = {
        kind: _asked(contest, kind, "generate", (_PROMPT_TOKENS,), _NEW_TOKENS)
        for kind in ("ours", "transformers", "llama_cpp")
    }
    return {**sides, "bandwidth": bandwidth}


def _eight_sides(contest: Contest) -> Mapping[str, Measure]:
    return {
        "ours": _asked(contest, "ours", "generate", _EIGHT_PROMPTS, _EIGHT_NEW_TOKENS),
        "padded": _asked(contest, "transformers", "generate", _EIGHT_PROMPTS, _EIGHT_NEW_TOKENS),
        "batched": _asked(contest, "transformers", "generate_batch", _EIGHT_PROMPTS, _EIGHT_NEW_TOKENS),
    }


def _prefill_sides(contest: Contest) -> Mapping[str, Measure]:
    def timed(kind: str) -> Measure:
        asked = _asked(contest, kind, "generate", (_PREFILL_TOKENS,), 1)
        return lambda number: {"prompt_tokens_per_second": _PREFILL_TOKENS / asked(number)["first_seconds"]}

    return {kind: timed(kind) for kind in ("ours", "transformers", "llama_cpp")}


def _product_sides(rows: int) -> Callable[[Contest], Mapping[str, Measure]]:
    def sides(contest: Contest) -> Mapping[str, Measure]:
        def timed(how: str) -> Measure:
            return lambda _: contest.ask("ours_products", "multiply", rows=rows, how=how)

        return {"ours": timed("packed"), "xla": timed("xla")}

    return sides


def _row(name: str, metric: str, peers: Mapping[str, str], bar: float | None) -> RowSpec:
    return RowSpec(name=name, unit="tokens/s", metric=metric, peers=peers, bar=bar)


_LLAMA = {"llama_cpp": "llama.cpp, F32"}
_TRANSFORMERS = {"transformers": "transformers generate, float32"}
ONE = Group(
    name="decode-1",
    sides=_one_sides,
    rows=(
        _row("decode, 1 request", "decode_tokens_per_second", _TRANSFORMERS, 3.0),
        _row("decode, 1 request, of bandwidth", "decode_tokens_per_second", {"bandwidth": "weights read once"}, 0.7),
        _row("decode, 1 request, llama.cpp", "decode_tokens_per_second", _LLAMA, None),
    ),
)
EIGHT = Group(
    name="decode-8",
    sides=_eight_sides,
    most_rounds=3,
    rows=(
        _row(
            "decode, 8 at once",
            "tokens_per_second",
            {"padded": "transformers padded generate", "batched": "transformers generate_batch"},
            2.0,
        ),
    ),
)
PREFILL = Group(
    name="prefill",
    sides=_prefill_sides,
    rows=(
        _row("prefill, 512 tokens", "prompt_tokens_per_second", _TRANSFORMERS, 1.0),
        _row("prefill, 512 tokens, llama.cpp", "prompt_tokens_per_second", _LLAMA, None),
    ),
)
PRODUCTS = tuple(
    Group(
        name=f"products-{rows}",
        sides=_product_sides(rows),
        rows=(
            RowSpec(
                name=f"products of all layers, {rows} rows",
                unit="s",
                metric="seconds",
                peers={"xla": "XLA's own"},
                bar=None,
                is_smaller_better=True,
            ),
        ),
    )
    for rows in (1, 8, 64)
)
