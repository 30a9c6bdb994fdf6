"""Rotary position embedding, in the half-split layout of transformers.

Owns the rotation of queries and keys. Knows nothing of models or configs. The one decision: cosines and sines are made
once for a pass, in float32, and shared by its layers and heads.

Shape suffixes: B batch, T tokens, N heads, H head_dim, F half of the numbers that turn.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rotation(
    positions_BT: jax.Array, *, frequencies_F: np.ndarray[Any, Any], attention_factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, F] each; one pair serves every layer and head."""
    angles_BTF = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies_F)
    cos, sin = jnp.cos(angles_BTF)[:, :, None, :], jnp.sin(angles_BTF)[:, :, None, :]
    return (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)


def rotate(x_BTNH: jax.Array, *, cos: jax.Array, sin: jax.Array, in_float32: bool = False) -> jax.Array:
    """Turn the pairs (i, i + F) of the first 2 F numbers of each head; the rest pass. Keeps dtype and shape.

    Args:
        x_BTNH: queries or keys.
        cos: of `rotation`.
        sin: of `rotation`.
        in_float32: multiply before rounding to the dtype of `x_BTNH`, where that is narrower.
    """
    num_turned = 2 * cos.shape[-1]
    turned, passed = (x_BTNH, None) if num_turned == x_BTNH.shape[-1] else jnp.split(x_BTNH, [num_turned], axis=-1)
    first, second = jnp.split(turned, 2, axis=-1)
    if not in_float32:
        cos, sin = cos.astype(x_BTNH.dtype), sin.astype(x_BTNH.dtype)
    halves = [first * cos - second * sin, second * cos + first * sin]
    out = jnp.concatenate(halves if passed is None else [*halves, passed], axis=-1)
    return out.astype(x_BTNH.dtype)
