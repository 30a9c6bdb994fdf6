"""ATen attention.

Owns scaled dot product attention in the forms torch has for it. Knows nothing of programs. The one decision: the plain
formula, a row that sees nothing giving zeros as torch does; XLA fuses it, and every variant is a choice of mask.

Shape suffixes: N heads, K key-value heads, T queries, S keys, H head size.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.operations_random import Draw, dropout
from pipeline.models.traced.operations_reduction import safe_softmax


def scaled_dot_product_attention(
    draw: Draw,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """[..., N, T, H] queries, [..., K, S, H] keys and values to [..., N, T, H].

    Boolean masks say what is seen; float masks are added to the scores.
    """
    key, value = _for_each_head(query, key, value) if enable_gqa else (key, value)
    scores = _scores(query, key, attn_mask, is_causal=is_causal, scale=scale)
    shares = jax.nn.softmax(scores, axis=-1) if attn_mask is None else safe_softmax(scores, -1)
    shares = shares.astype(query.dtype)
    if dropout_p > 0:
        shares = dropout(draw, shares, dropout_p, True)
    return jnp.matmul(shares, value)


def flash_attention(
    draw: Draw,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output, and the logarithm of each row's sum, by the name torch's CPU kernel has."""
    y = scaled_dot_product_attention(draw, query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return y, jax.nn.logsumexp(_scores(query, key, attn_mask, is_causal=is_causal, scale=scale), axis=-1)


def _scores(
    query: jax.Array, key: jax.Array, attn_mask: jax.Array | None, *, is_causal: bool, scale: float | None
) -> jax.Array:
    """[..., N, T, S], -inf where nothing is seen."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2))
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * scale
    if is_causal:
        num_queries, num_keys = scores.shape[-2:]
        scores = jnp.where(jnp.tri(num_queries, num_keys, dtype=jnp.bool_), scores, -jnp.inf)
    if attn_mask is None:
        return scores
    if attn_mask.dtype == jnp.bool_:
        return jnp.where(attn_mask, scores, -jnp.inf)
    return scores + attn_mask.astype(scores.dtype)


def _for_each_head(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values repeated for the query heads that share them."""
    axis = query.ndim - 3
    num_queries = query.shape[axis]
    repeated = (jnp.repeat(part, num_queries // part.shape[axis], axis=axis) for part in (key, value))
    key, value = repeated
    return key, value


ATTENTION: Mapping[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": scaled_dot_product_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
}
