"""The next token, chosen on the device.

Owns temperature, min-p, top-k and top-p, in this order, which is vLLM's (`v1/sample/sampler.py`). Knows nothing of the
model or of requests, nor of what changes the logits before (`token_choice.py`). The one decision: thresholds are found
by bisection over the bit patterns of the scores, not by sorting: a pass is one vectorized sum over the vocabulary and
32 passes are exact.

Shape suffixes: B batch, V vocabulary, S stretches of it, L of a stretch.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BITS = 32
_STRETCH = 128
_LANES = 16


class SamplingRows(NamedTuple):
    """Sampling settings of each row."""

    temperature_B: jax.Array
    """float32; 0 is greedy."""
    top_k_B: jax.Array
    """int32; 0 keeps all."""
    top_p_B: jax.Array
    """float32; 1 keeps all."""
    min_p_B: jax.Array
    """float32; 0 keeps all."""
    seed_B: jax.Array
    """uint32."""


def sample(logits_BV: jax.Array, *, rows: SamplingRows, positions_B: jax.Array) -> jax.Array:
    """The token of each row that goes to `positions_B`; int32 [B].

    A row's random number depends on its seed and position alone, so its tokens are the same in any batch. It is one
    number a row: a token is drawn where the running sum of the probabilities passes it. Gumbel noise would be one
    number for each token of the vocabulary.
    """
    greedy_B = most_likely(logits_BV)

    def drawn() -> jax.Array:
        is_greedy_B = rows.temperature_B <= 0.0
        scaled_BV = logits_BV / jnp.where(is_greedy_B, 1.0, rows.temperature_B)[:, None]
        is_cut = jnp.any((rows.top_k_B > 0) | (rows.top_p_B < 1.0))
        likely_BV = above_min_p(scaled_BV, min_p_B=rows.min_p_B)
        kept_BV = jax.lax.cond(is_cut, lambda: cut(likely_BV, k_B=rows.top_k_B, p_B=rows.top_p_B), lambda: likely_BV)
        uniform_B = jax.vmap(_uniform)(rows.seed_B, positions_B)
        return jnp.where(is_greedy_B, greedy_B, _at_quantile(kept_BV, uniform_B=uniform_B))

    return jax.lax.cond(jnp.any(rows.temperature_B > 0.0), drawn, lambda: greedy_B)


def most_likely(scores_BV: jax.Array) -> jax.Array:
    """The first of each row's largest scores; int32 [B]. Where a score is NaN, which has no order, it is some token.

    Through the largest of each stretch of the vocabulary: XLA:CPU makes vectors of a maximum and none of an argmax,
    which over 8 rows of 49,152 takes 1.8 ms, and this 0.2.
    """
    num_rows, num_tokens = scores_BV.shape
    stretch = math.gcd(num_tokens, _STRETCH)
    if stretch < _LANES:
        return jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    apart_BSL = scores_BV.reshape(num_rows, -1, stretch)
    first_B = jnp.argmax(jnp.max(apart_BSL, axis=-1), axis=-1)
    within_BL = jnp.take_along_axis(apart_BSL, first_B[:, None, None], axis=1)[:, 0]
    return (first_B * stretch + jnp.argmax(within_BL, axis=-1)).astype(jnp.int32)


def above_min_p(scores_BV: jax.Array, *, min_p_B: jax.Array) -> jax.Array:
    """Scores with tokens less likely than `min_p` times the most likely one at minus infinity."""
    # The normalizer of the softmax cancels, and log(0) lets everything pass.
    least_B = jnp.max(scores_BV, axis=-1) + jnp.log(min_p_B)
    return jnp.where(scores_BV >= least_B[:, None], scores_BV, -jnp.inf)


def cut(scores_BV: jax.Array, *, k_B: jax.Array, p_B: jax.Array) -> jax.Array:
    """Scores with everything outside the top k, and then outside the top p of what is left, at minus infinity.

    A token that ties with the last one kept is kept. Both cuts are one loop body, because every operation in it costs
    compile time in each decode executable.
    """
    num_tokens = scores_BV.shape[1]
    # A cut that no row asks for would cost as much as one that all do, and change nothing.
    first = jnp.where(jnp.any(k_B > 0), 0, 1)
    end = jnp.where(jnp.any(p_B < 1.0), 2, 1)
    k_B = jnp.where(k_B > 0, jnp.minimum(k_B, num_tokens), num_tokens).astype(jnp.float32)

    def stage(index: jax.Array, scores_BV: jax.Array) -> jax.Array:
        mass_BV = jax.nn.softmax(scores_BV, axis=-1)
        is_top_k = index == 0
        weight_BV = jnp.where(is_top_k, 1.0, mass_BV)
        # Rounding can leave the mass of the whole row a hair below p.
        wanted_B = jnp.where(is_top_k, k_B, jnp.minimum(p_B, jnp.sum(mass_BV, axis=-1)))
        threshold_B = _largest_threshold(scores_BV, weight_BV=weight_BV, wanted_B=wanted_B)
        threshold_B = jnp.where(is_top_k | (p_B < 1.0), threshold_B, -jnp.inf)
        return jnp.where(scores_BV >= threshold_B[:, None], scores_BV, -jnp.inf)

    return jax.lax.fori_loop(first, end, stage, scores_BV)


def _largest_threshold(scores_BV: jax.Array, *, weight_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
    """The largest t of each row for which the weights of `scores >= t` sum to at least `wanted_B`, exact to the bit."""
    order_BV = _ordered(scores_BV)

    def bit(index: jax.Array, found_B: jax.Array) -> jax.Array:
        tried_B = found_B | (jnp.uint32(1) << (_BITS - 1 - index).astype(jnp.uint32))
        sum_B = jnp.sum(jnp.where(order_BV >= tried_B[:, None], weight_BV, 0.0), axis=-1)
        return jnp.where(sum_B >= wanted_B, tried_B, found_B)

    return _unordered(jax.lax.fori_loop(0, _BITS, bit, jnp.zeros(scores_BV.shape[0], jnp.uint32)))


def _at_quantile(scores_BV: jax.Array, *, uniform_B: jax.Array) -> jax.Array:
    """The first token at which the running sum of the softmax exceeds `uniform_B` of its total; int32 [B]."""
    num_tokens = scores_BV.shape[1]
    mass_BV = jnp.exp(scores_BV - jnp.max(scores_BV, axis=-1, keepdims=True))
    target_B = uniform_B * jnp.sum(mass_BV, axis=-1)
    tokens_V = jnp.arange(num_tokens)

    def bit(index: jax.Array, below_B: jax.Array) -> jax.Array:
        # `below` counts tokens that lie wholly at or below the target; grown bit by bit from the highest.
        tried_B = below_B + (jnp.int32(1) << (num_bits - 1 - index))
        sum_B = jnp.sum(jnp.where(tokens_V < tried_B[:, None], mass_BV, 0.0), axis=-1)
        return jnp.where((tried_B <= num_tokens) & (sum_B <= target_B), tried_B, below_B)

    num_bits = num_tokens.bit_length()
    found_B = jax.lax.fori_loop(0, num_bits, bit, jnp.zeros(scores_BV.shape[0], jnp.int32))
    # Rounding can pass the end, or stop at a token of no mass behind the last one of some: take the last of some.
    last_B = num_tokens - 1 - jnp.argmax(mass_BV[:, ::-1] > 0, axis=-1).astype(jnp.int32)
    return jnp.minimum(found_B, last_B)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 to uint32 of the same order: flip all bits of a negative number, the sign bit of a positive one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _unordered(order: jax.Array) -> jax.Array:
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32(0x7FFFFFFF), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))
