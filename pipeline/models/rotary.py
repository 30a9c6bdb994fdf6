"""Rotary position embedding, in the half-split layout of transformers.

Owns the rotation of queries and keys. Knows nothing of models or configs. The one decision: cosines and sines are made
once for a pass, in float32, and shared by its layers and heads.

Shape suffixes: B batch, T tokens, N heads, H head_dim, F head_dim / 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rotation(positions_BT: jax.Array, *, frequencies_F: np.ndarray[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, F] each; one pair serves every layer and head."""
    angles_BTF = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies_F)
    return jnp.cos(angles_BTF)[:, :, None, :], jnp.sin(angles_BTF)[:, :, None, :]


def rotate(x_BTNH: jax.Array, *, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + head_dim / 2); keeps dtype and shape."""
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = cos.astype(x_BTNH.dtype), sin.astype(x_BTNH.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
