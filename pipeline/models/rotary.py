"""Rotary position embedding, in the half-split layout of transformers.

Owns the frequencies (default, linear and llama3 scaling) and their application. Knows nothing of models or
checkpoints. The one decision: scaling is a typed value parsed once from the config; a scaling this file does not
compute is refused there, so no model ever runs with the wrong frequencies.

Shape suffixes: B batch, T tokens, N heads, H head_dim, F head_dim / 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.errors import ParameterError, nearest_name

DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How frequencies depend on the position; fields other than `theta` matter for the named `kind` alone."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RotaryScaling":
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
            ParameterError: the scaling is unknown or lacks a field.
        """
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = str(given.get("rope_type", given.get("type", "default")))
        if kind not in ROPE_TYPES:
            guess = nearest_name(kind, ROPE_TYPES)
            raise ParameterError(
                f"model config: rope scaling {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}"
                + (f"; did you mean {guess!r}?" if guess else ""),
                hint="convert a checkpoint that was trained with one of these scalings",
            )
        if float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
            raise ParameterError("model config: partial_rotary_factor other than 1.0 is not supported")
        theta = given.get("rope_theta", config.get("rope_theta"))
        required = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }[kind]
        missing = [name for name in required if given.get(name) is None]
        if missing:
            raise ParameterError(f"model config: rope scaling {kind!r} needs {', '.join(missing)}")
        numbers = {name: given[name] for name in required}
        return cls(kind=kind, theta=float(theta if theta is not None else DEFAULT_THETA), **numbers)

    def frequencies(self, head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Angle per position, float32 [head_dim / 2].

        Formula: `theta ** (-2i / head_dim)`; linear divides by `factor`; llama3 interpolates between both by wavelength
        (transformers, `modeling_rope_utils._compute_llama3_parameters`).
        """
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        plain_F = (np.float32(1.0) / np.power(np.float32(self.theta), exponent)).astype(np.float32)
        if self.kind == "default":
            return plain_F
        slowed_F = plain_F / np.float32(self.factor)
        if self.kind == "linear":
            return slowed_F.astype(np.float32)
        wavelength_F = 2 * math.pi / plain_F
        smooth_F = (self.original_max_position_embeddings / wavelength_F - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended_F = (1 - smooth_F) * slowed_F + smooth_F * plain_F
        is_low = wavelength_F > self.original_max_position_embeddings / self.low_freq_factor
        is_high = wavelength_F < self.original_max_position_embeddings / self.high_freq_factor
        return np.where(is_low, slowed_F, np.where(is_high, plain_F, blended_F)).astype(np.float32)


def rotation(positions_BT: jax.Array, *, frequencies_F: np.ndarray[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, F] each; one pair serves every layer and head."""
    angles_BTF = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies_F)
    return jnp.cos(angles_BTF)[:, :, None, :], jnp.sin(angles_BTF)[:, :, None, :]


def rotate(x_BTNH: jax.Array, *, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + head_dim / 2); keeps dtype and shape."""
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = cos.astype(x_BTNH.dtype), sin.astype(x_BTNH.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
