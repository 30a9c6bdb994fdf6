"""The forward pass of a traced model against that of the same model's family.

Owns the comparison. Knows nothing of how either is computed. The one decision: both are converted from one checkpoint
by the public road, jitted, and run in turns, so that whatever else the machine does meets both.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from transformers import AutoConfig, AutoModelForCausalLM

from converters.conversion import convert
from pipeline.diagnostics.bench_result import BenchRow
from pipeline.models.checkpoint import load_model
from pipeline.models.registry import describe

BAR = 1 / 1.1
"""The traced forward pass takes at most 1.1 times as long as the family's."""
BATCH = 4
TOKENS = 128
_TURNS_PER_ROUND = 5
_MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "llama-8m.json"


def speed_row(*, rounds: int, model: Path = _MODEL) -> BenchRow:
    """Tokens per second of both forward passes, medians of `rounds` after one that warms up."""
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as scratch:
        checkpoint = Path(scratch, "torch")
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(model)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(checkpoint)
        traced, family = (_forward(checkpoint, to=Path(scratch, via), via=via) for via in ("trace", "family"))
        seconds: dict[str, list[float]] = {"traced": [], "family": []}
        for _ in range(rounds + 1):
            seconds["traced"].append(0.0)
            seconds["family"].append(0.0)
            for _ in range(_TURNS_PER_ROUND):
                seconds["traced"][-1] += _timed(traced)
                seconds["family"][-1] += _timed(family)
    tokens = BATCH * TOKENS * _TURNS_PER_ROUND
    return BenchRow(
        name=f"forward pass of traced {model.stem}, {BATCH} x {TOKENS} tokens",
        unit="tokens/s",
        ours=tokens / statistics.median(seconds["traced"][1:]),
        peer_name="its family's forward pass",
        peer=tokens / statistics.median(seconds["family"][1:]),
        bar=BAR,
    )


def _forward(checkpoint: Path, *, to: Path, via: Any) -> Callable[[], Any]:
    """The jitted forward pass on random tokens."""
    convert(checkpoint, to=to, via=via)
    described = describe(to)
    graph, state = nnx.split(load_model(to, dtype=None))
    tokens = np.random.default_rng(0).integers(0, 1000, (BATCH, TOKENS)).astype(np.int32)
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}

    @jax.jit
    def forward(state: Any, inputs: Any) -> Any:
        return described.forward(nnx.merge(graph, state), inputs)

    return lambda: jax.block_until_ready(forward(state, inputs))


def _timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
