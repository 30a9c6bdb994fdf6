"""ATen activations.

Owns the functions between layers. Knows nothing of programs. The one decision: jax.nn's own where it computes the same
thing, with torch's parameters, never JAX's defaults (GELU's approximation, softplus' threshold).
Formulas: https://docs.pytorch.org/docs/stable/nn.functional.html
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def gelu(x: jax.Array, approximate: str = "none") -> jax.Array:
    """By the error function, or by tanh."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def softplus(x: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
    """`log(1 + exp(beta x)) / beta`, the input itself beyond the threshold."""
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def elu(x: jax.Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> jax.Array:
    """`scale * (x if x > 0 else alpha * (exp(input_scale x) - 1))`."""
    negative = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return jnp.where(x > 0, x, negative) * scale


def celu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    """`max(0, x) + min(0, alpha (exp(x / alpha) - 1))`."""
    return elu(x, alpha, 1.0, 1.0 / alpha)


def selu(x: jax.Array) -> jax.Array:
    """Scaled `elu`."""
    return elu(x, SELU_ALPHA, SELU_SCALE)


def leaky_relu(x: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    """A slope where x is negative."""
    return jnp.where(x > 0, x, x * negative_slope)


def hardtanh(x: jax.Array, low: float = -1.0, high: float = 1.0) -> jax.Array:
    """Between two limits."""
    return jnp.clip(x, low, high)


def relu6(x: jax.Array) -> jax.Array:
    """Between 0 and 6."""
    return jnp.clip(x, 0, 6)


def hardsigmoid(x: jax.Array) -> jax.Array:
    """`relu6(x + 3) / 6`."""
    return jnp.clip(x + 3, 0, 6) / 6


def hardswish(x: jax.Array) -> jax.Array:
    """`x * relu6(x + 3) / 6`."""
    return x * jnp.clip(x + 3, 0, 6) / 6


def hardshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Zero within `lambd` of zero."""
    return jnp.where(jnp.abs(x) > lambd, x, jnp.zeros_like(x))


def softshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    """Nearer to zero by `lambd`."""
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, jnp.zeros_like(x)))


def threshold(x: jax.Array, limit: float, value: float) -> jax.Array:
    """`value` where x is not above the limit."""
    return jnp.where(x > limit, x, jnp.asarray(value, x.dtype))


def mish(x: jax.Array) -> jax.Array:
    """`x * tanh(softplus(x))`."""
    return x * jnp.tanh(jax.nn.softplus(x))


def log_sigmoid_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The value, and the buffer that torch keeps for its gradient (empty here)."""
    return jax.nn.log_sigmoid(x), jnp.zeros((0,), x.dtype)


def glu(x: jax.Array, dim: int = -1) -> jax.Array:
    """First half times sigmoid of the second."""
    first, second = jnp.split(x, 2, axis=dim)
    return first * jax.nn.sigmoid(second)


def prelu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A learned slope a channel (axis 1) where x is negative."""
    if weight.size > 1 and weight.ndim < x.ndim:
        weight = weight.reshape((1, -1) + (1,) * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


def tanhshrink(x: jax.Array) -> jax.Array:
    """`x - tanh(x)`."""
    return x - jnp.tanh(x)


ACTIVATION: Mapping[str, Callable[..., Any]] = {
    "aten.relu.default": jax.nn.relu,
    "aten.relu6.default": relu6,
    "aten.silu.default": jax.nn.silu,
    "aten.gelu.default": gelu,
    "aten.softplus.default": softplus,
    "aten.softsign.default": jax.nn.soft_sign,
    "aten.elu.default": elu,
    "aten.celu.default": celu,
    "aten.selu.default": selu,
    "aten.leaky_relu.default": leaky_relu,
    "aten.hardtanh.default": hardtanh,
    "aten.hardsigmoid.default": hardsigmoid,
    "aten.hardswish.default": hardswish,
    "aten.hardshrink.default": hardshrink,
    "aten.softshrink.default": softshrink,
    "aten.threshold.default": threshold,
    "aten.mish.default": mish,
    "aten.log_sigmoid.default": jax.nn.log_sigmoid,
    "aten.log_sigmoid_forward.default": log_sigmoid_forward,
    "aten.glu.default": glu,
    "aten.prelu.default": prelu,
    "aten._prelu_kernel.default": prelu,
    "aten.tanhshrink.default": tanhshrink,
}
