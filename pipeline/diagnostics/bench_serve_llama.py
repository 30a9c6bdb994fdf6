"""The llama.cpp side of `pipeline bench serve`: the same weights in float32, two threads.

Owns the Python package's calls. Runs in a process of its own. The one decision: its own greedy sampler and its own
evaluation are used token by token, which is what the package's generator does.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import Llama

from pipeline.diagnostics.bench_serve_side import THREADS

GGUF_FILE = "model-f32.gguf"
_CONTEXT = 1024


def answers(directory: Path) -> Mapping[str, Callable[..., Any]]:
    """Of a decoder."""
    model = Llama(
        str(directory / GGUF_FILE),
        n_ctx=_CONTEXT,
        n_batch=512,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        verbose=False,
    )

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
        (prompt,) = prompts
        model.reset()
        started = time.perf_counter()
        model.eval(list(prompt))
        token = model.sample(temp=0.0)
        first = time.perf_counter()
        for _ in range(num_tokens - 1):
            model.eval([token])
            token = model.sample(temp=0.0)
        last = time.perf_counter()
        return {
            "first_seconds": first - started,
            "tokens_per_second": num_tokens / (last - started),
            "decode_tokens_per_second": (num_tokens - 1) / max(last - first, 1e-9),
        }

    return {"generate": generate}
