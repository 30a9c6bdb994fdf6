"""ATen normalizations.

Owns layer, group, batch, instance and root mean square norms. Knows nothing of programs. The one decision: statistics
are taken in float32 and the result returns to the input's dtype, as torch's kernels do; eps always comes from the call.

Shapes: C channels are dim 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance, dims kept."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


def native_layer_norm(
    x: jax.Array, shape: Sequence[int], weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalized over the last dims; also mean and reciprocal deviation."""
    wide = _wide(x)
    mean, variance = _moments(wide, tuple(range(x.ndim - len(shape), x.ndim)))
    scale = jax.lax.rsqrt(variance + eps)
    y = (wide - mean) * scale
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    return y.astype(x.dtype), mean, scale


def layer_norm(
    x: jax.Array,
    shape: Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> jax.Array:
    """Normalized over the last dims."""
    return native_layer_norm(x, shape, weight, bias, eps)[0]


def rms_norm(
    x: jax.Array, shape: Sequence[int], weight: jax.Array | None = None, eps: float | None = None
) -> jax.Array:
    """Divided by the root mean square of the last dims; eps is the dtype's own where none is given."""
    return fused_rms_norm(x, shape, weight, eps)[0]


def fused_rms_norm(
    x: jax.Array, shape: Sequence[int], weight: jax.Array | None, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    """As `rms_norm`; also the reciprocal root."""
    wide = _wide(x)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    y = wide * scale
    return (y if weight is None else y * _wide(weight)).astype(x.dtype), scale


def native_group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    batch: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalized within groups of channels; also mean and reciprocal deviation, [batch, groups]."""
    wide = _wide(x).reshape(x.shape[0], groups, -1)
    mean, variance = _moments(wide, (2,))
    scale = jax.lax.rsqrt(variance + eps)
    y = _affine(((wide - mean) * scale).reshape(x.shape), weight, bias)
    return y.astype(x.dtype), mean[..., 0], scale[..., 0]


def group_norm(
    x: jax.Array,
    groups: int,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> jax.Array:
    """Normalized within groups of channels."""
    area = math.prod(x.shape[2:])
    return native_group_norm(x, weight, bias, x.shape[0], x.shape[1], area, groups, eps)[0]


def _per_channel(x: jax.Array, ndim: int) -> jax.Array:
    return _wide(x).reshape((1, -1) + (1,) * (ndim - 2))


def _affine(y: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if weight is not None:
        y = y * _per_channel(weight, y.ndim)
    return y if bias is None else y + _per_channel(bias, y.ndim)


def batch_norm_inference(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    variance: jax.Array,
    _momentum: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By the running statistics; torch's saved statistics are empty then."""
    scale = jax.lax.rsqrt(_per_channel(variance, x.ndim) + eps)
    y = _affine((_wide(x) - _per_channel(mean, x.ndim)) * scale, weight, bias)
    empty = jnp.zeros((0,), jnp.float32)
    return y.astype(x.dtype), empty, empty


def batch_norm_statistics(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By the batch's own statistics; also its mean and reciprocal deviation."""
    wide = _wide(x)
    mean, variance = _moments(wide, (0, *range(2, x.ndim)))
    scale = jax.lax.rsqrt(variance + eps)
    y = _affine((wide - mean) * scale, weight, bias)
    return y.astype(x.dtype), mean.reshape(-1), scale.reshape(-1)


def batch_norm_functional(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_variance: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Output, saved mean and deviation, new running mean and variance.

    `new = (1 - momentum) old + momentum batch`; the running variance is the unbiased one.
    """
    if not training:
        made = batch_norm_inference(x, weight, bias, running_mean, running_variance, momentum, eps)
        return (*made, running_mean, running_variance)
    y, mean, scale = batch_norm_statistics(x, weight, bias, eps)
    count = x.size // x.shape[1]
    unbiased = (1 / jnp.square(scale) - eps) * (count / max(count - 1, 1))
    new_mean = (1 - momentum) * running_mean + momentum * mean.astype(running_mean.dtype)
    new_variance = (1 - momentum) * running_variance + momentum * unbiased.astype(running_variance.dtype)
    return y, mean, scale, new_mean, new_variance


def batch_norm_no_stats(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    _training: bool,
    _momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Without running statistics: always the batch's own."""
    return batch_norm_statistics(x, weight, bias, eps)


def batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_variance: jax.Array | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = True,
) -> jax.Array:
    """The output alone."""
    if training or running_mean is None or running_variance is None:
        return batch_norm_statistics(x, weight, bias, eps)[0]
    return batch_norm_inference(x, weight, bias, running_mean, running_variance, momentum, eps)[0]


def instance_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_variance: jax.Array | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = True,
) -> jax.Array:
    """Normalized within each example and channel, or by the running statistics."""
    if not use_input_stats and running_mean is not None and running_variance is not None:
        return batch_norm_inference(x, weight, bias, running_mean, running_variance, momentum, eps)[0]
    wide = _wide(x)
    mean, variance = _moments(wide, tuple(range(2, x.ndim)))
    return _affine((wide - mean) * jax.lax.rsqrt(variance + eps), weight, bias).astype(x.dtype)


def weight_norm(v: jax.Array, g: jax.Array, dim: int = 0) -> jax.Array:
    """`g * v / |v|`, the norm over all dims but `dim`."""
    return weight_norm_interface(v, g, dim)[0]


def weight_norm_interface(v: jax.Array, g: jax.Array, dim: int = 0) -> tuple[jax.Array, jax.Array]:
    """As `weight_norm`; also the norm."""
    axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    norm = jnp.sqrt(jnp.sum(jnp.square(_wide(v)), axis=axes, keepdims=True))
    return (v * (g / norm)).astype(v.dtype), norm


NORMALIZATION: Mapping[str, Callable[..., Any]] = {
    "aten.layer_norm.default": layer_norm,
    "aten.native_layer_norm.default": native_layer_norm,
    "aten.rms_norm.default": rms_norm,
    "aten._fused_rms_norm.default": fused_rms_norm,
    "aten.group_norm.default": group_norm,
    "aten.native_group_norm.default": native_group_norm,
    "aten.batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_inference,
    "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
    "aten._native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "aten.instance_norm.default": instance_norm,
    "aten._weight_norm.default": weight_norm,
    "aten._weight_norm_interface.default": weight_norm_interface,
}
