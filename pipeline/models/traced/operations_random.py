"""ATen operations that draw random numbers.

Owns dropout and random fills. Knows nothing of where keys come from: each operation is given `draw`, and calls it only
when it draws. The one decision: the numbers are JAX's, so they have torch's distribution and never torch's values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from pipeline.models.traced.dtypes import DEFAULT_FLOAT
from pipeline.models.traced.operations_activation import SELU_ALPHA, SELU_SCALE

Draw = Callable[[], jax.Array]
"""Gives a fresh key; raises where the caller gave no rngs."""


def dropout(draw: Draw, x: jax.Array, probability: float, train: bool | None = True) -> jax.Array:
    """Zero with this probability, the rest scaled so that the mean stays; nothing outside training."""
    if not train or probability == 0:
        return x
    return _dropped(draw, x, probability, x.shape)


def native_dropout(
    draw: Draw, x: jax.Array, probability: float, train: bool | None = True
) -> tuple[jax.Array, jax.Array]:
    """As `dropout`; also what was kept."""
    if not train or probability == 0:
        return x, jnp.ones(x.shape, jnp.bool_)
    kept = random.bernoulli(draw(), 1 - probability, x.shape)
    return jnp.where(kept, x / (1 - probability), 0).astype(x.dtype), kept


def feature_dropout(draw: Draw, x: jax.Array, probability: float, train: bool) -> jax.Array:
    """Whole channels (dims 0 and 1) are dropped."""
    if not train or probability == 0:
        return x
    return _dropped(draw, x, probability, (*x.shape[:2], *(1 for _ in x.shape[2:])))


def alpha_dropout(draw: Draw, x: jax.Array, probability: float, train: bool) -> jax.Array:
    """Dropout that keeps mean and variance under SELU."""
    if not train or probability == 0:
        return x
    kept = random.bernoulli(draw(), 1 - probability, x.shape)
    floor = -SELU_ALPHA * SELU_SCALE
    a = ((1 - probability) * (1 + probability * floor**2)) ** -0.5
    return (a * jnp.where(kept, x, floor) - a * floor * probability).astype(x.dtype)


def _dropped(draw: Draw, x: jax.Array, probability: float, shape: tuple[int, ...]) -> jax.Array:
    if probability == 1:
        return jnp.zeros_like(x)
    kept = random.bernoulli(draw(), 1 - probability, shape)
    return jnp.where(kept, x / (1 - probability), 0).astype(x.dtype)


def rand(draw: Draw, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Uniform in [0, 1)."""
    return random.uniform(draw(), tuple(size), DEFAULT_FLOAT if dtype is None else dtype)


def rand_like(draw: Draw, x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    """Uniform in [0, 1), in the shape of x."""
    return random.uniform(draw(), x.shape, x.dtype if dtype is None else dtype)


def randn(draw: Draw, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Standard normal."""
    return random.normal(draw(), tuple(size), DEFAULT_FLOAT if dtype is None else dtype)


def randn_like(draw: Draw, x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    """Standard normal, in the shape of x."""
    return random.normal(draw(), x.shape, x.dtype if dtype is None else dtype)


def randint(draw: Draw, high: int, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Whole numbers in [0, high)."""
    return randint_from(draw, 0, high, size, dtype)


def randint_from(draw: Draw, low: int, high: int, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Whole numbers in [low, high)."""
    drawn = random.randint(draw(), tuple(size), low, high, jnp.int32)
    return drawn if dtype is None else drawn.astype(dtype)


def randint_like(draw: Draw, x: jax.Array, *limits: int, dtype: Any = None, **_: Any) -> jax.Array:
    """Whole numbers in [low, high), in the shape of x; low is 0 where one limit is given."""
    low, high = (0, limits[0]) if len(limits) == 1 else limits[:2]
    return randint_from(draw, low, high, x.shape, x.dtype if dtype is None else dtype)


def randperm(draw: Draw, count: int, dtype: Any = None, **_: Any) -> jax.Array:
    """The numbers below `count` in random order."""
    return random.permutation(draw(), count).astype(jnp.int32 if dtype is None else dtype)


def bernoulli(draw: Draw, x: jax.Array, probability: Any = None) -> jax.Array:
    """Ones with the probability that x holds, or the one that is given; in the dtype of x."""
    chance = x if probability is None else probability
    return random.bernoulli(draw(), chance, x.shape).astype(x.dtype)


def multinomial(draw: Draw, x: jax.Array, num_samples: int, replacement: bool = False) -> jax.Array:
    """Indices drawn by weight, [..., num_samples]; without replacement by the Gumbel trick."""
    logits = jnp.log(x)
    if replacement:
        drawn = random.categorical(draw(), logits, axis=-1, shape=(num_samples, *x.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1).astype(jnp.int32)
    return jax.lax.top_k(logits + random.gumbel(draw(), x.shape, logits.dtype), num_samples)[1].astype(jnp.int32)


def normal(draw: Draw, mean: Any = 0.0, std: Any = 1.0, size: Sequence[int] | None = None, **_: Any) -> jax.Array:
    """Normal with these means and deviations, tensors or numbers."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)) if size is None else tuple(size)
    return mean + std * random.normal(draw(), shape, DEFAULT_FLOAT)


def normal_filled(draw: Draw, x: jax.Array, mean: float = 0.0, std: float = 1.0, **_: Any) -> jax.Array:
    """Normal, in the shape of x."""
    return (mean + std * random.normal(draw(), x.shape, x.dtype)).astype(x.dtype)


def uniform_filled(draw: Draw, x: jax.Array, low: float = 0.0, high: float = 1.0, **_: Any) -> jax.Array:
    """Uniform in [low, high), in the shape of x."""
    return random.uniform(draw(), x.shape, x.dtype, low, high)


def exponential_filled(draw: Draw, x: jax.Array, rate: float = 1.0, **_: Any) -> jax.Array:
    """Exponential with this rate, in the shape of x."""
    return random.exponential(draw(), x.shape, x.dtype) / rate


def rrelu(
    draw: Draw, x: jax.Array, low: float = 1 / 8, high: float = 1 / 3, training: bool = False, _generator: Any = None
) -> jax.Array:
    """A slope where x is negative: random in training, the middle otherwise."""
    slope = random.uniform(draw(), x.shape, x.dtype, low, high) if training else (low + high) / 2
    return jnp.where(x >= 0, x, x * slope)


RANDOM: Mapping[str, Callable[..., Any]] = {
    "aten.dropout.default": dropout,
    "aten.native_dropout.default": native_dropout,
    "aten.feature_dropout.default": feature_dropout,
    "aten.alpha_dropout.default": alpha_dropout,
    "aten.rand.default": rand,
    "aten.rand_like.default": rand_like,
    "aten.randn.default": randn,
    "aten.randn_like.default": randn_like,
    "aten.randint.default": randint,
    "aten.randint.low": randint_from,
    "aten.randint_like.default": randint_like,
    "aten.randint_like.low_dtype": randint_like,
    "aten.randperm.default": randperm,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli,
    "aten.bernoulli.Tensor": bernoulli,
    "aten.multinomial.default": multinomial,
    "aten.normal.Tensor_Tensor": normal,
    "aten.normal.Tensor_float": normal,
    "aten.normal.float_Tensor": normal,
    "aten.normal.float_float": normal,
    "aten.normal_functional.default": normal_filled,
    "aten.uniform.default": uniform_filled,
    "aten.exponential.default": exponential_filled,
    "aten.rrelu.default": rrelu,
}
"""Every function takes `draw` first."""
