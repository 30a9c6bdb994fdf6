"""Rotary scaling as GGUF writes it, in transformers' words.

Owns that translation. Knows no family. The one decision: a scaling that cannot be written in the config is refused,
because a model without its scaling answers well on short texts and wrongly on long ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Factors = NDArray[np.float32]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3.1 and later. llama.cpp keeps the divisors of the frequencies that follow, and not the numbers."""
_FACTOR_TOLERANCE = 1e-4
"""Divisors are float32 computed in another order; they were at most 1e-6 apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeFacts:
    """What the tensors of a file say."""

    divisors: Factors | None
    """`rope_freqs.weight`: a divisor for each frequency."""
    long: Factors | None
    """`rope_factors_long.weight`."""
    short: Factors | None
    """`rope_factors_short.weight`."""
    has_attention_bias: bool


def rope_parameters(read: Callable[[str], Any], *, rope: RopeFacts, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of the config.

    Args:
        read: metadata of the architecture.
        rope: what tensors say.
        head_dim: numbers of a head.

    Raises:
        ValueError: the scaling is unknown, or its tensors fit none that is known.
    """
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(read("rope.freq_base") or 10_000.0)}
    rotated = int(read("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind, factor = read("rope.scaling.type") or "none", read("rope.scaling.factor")
    if (older := read("rope.scale_linear")) is not None and older != 1.0:
        kind, factor = "linear", older
    if rope.divisors is not None:
        return found | _llama3(rope.divisors, theta=found["rope_theta"])
    if rope.long is not None or rope.short is not None:
        if rope.long is None or rope.short is None:
            raise ValueError("it has one of rope_factors_long.weight and rope_factors_short.weight without the other")
        return found | {
            "rope_type": "longrope",
            "long_factor": rope.long.tolist(),
            "short_factor": rope.short.tolist(),
            "original_max_position_embeddings": read("rope.scaling.original_context_length"),
        }
    if kind == "linear" and factor:
        return found | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor:
        original = read("rope.scaling.original_context_length")
        return found | {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    if kind != "none":
        raise ValueError(f"rope.scaling.type is {kind!r} with factor {factor!r}; allowed: none, linear, yarn")
    return found


def _llama3(divisors: Factors, *, theta: float) -> dict[str, Any]:
    """The parameters whose divisors these are.

    Formula: transformers, `modeling_rope_utils._compute_llama3_parameters`, solved for the divisor.
    """
    factor = round(float(divisors.max()), 3)
    original = LLAMA3["original_max_position_embeddings"]
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=_FACTOR_TOLERANCE):
        raise ValueError("rope_freqs.weight are not the frequencies of Llama 3's scaling, which config.json could name")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
