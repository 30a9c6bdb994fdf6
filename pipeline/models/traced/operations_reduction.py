"""ATen operations that gather many elements into one, and running versions of them.

Owns sums, means, extremes, norms, softmax and cumulative sums. Knows nothing of programs. The one decision: dims are
torch's (absent or empty means all), and 16 bit floats are summed in float32, as both frameworks do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.dtypes import promote_float
from pipeline.models.traced.overloads import overloads

Dims = int | Sequence[int] | None


def axes_of(x: jax.Array, dims: Dims) -> tuple[int, ...] | None:
    """None for all; a tensor without dimensions takes dim 0 and -1 as all."""
    if dims is None or x.ndim == 0:
        return None
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(axis % x.ndim for axis in axes) or None


def _counted(x: jax.Array, dtype: Any) -> jax.Array:
    """Integers and bools are summed as integers of full width."""
    if dtype is not None:
        return x.astype(dtype)
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer) else x


def sum_(x: jax.Array, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Sum."""
    return jnp.sum(_counted(x, dtype), axis=axes_of(x, dims), keepdims=keepdim)


def nansum(x: jax.Array, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Sum of what is a number."""
    return jnp.nansum(_counted(x, dtype), axis=axes_of(x, dims), keepdims=keepdim)


def mean(x: jax.Array, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Mean."""
    x = x if dtype is None else x.astype(dtype)
    return jnp.mean(x, axis=axes_of(x, dims), keepdims=keepdim)


def prod(x: jax.Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """Product."""
    return jnp.prod(_counted(x, dtype), axis=axes_of(x, dim), keepdims=keepdim)


def var(x: jax.Array, dims: Any = None, correction: float | None = 1, keepdim: bool = False) -> jax.Array:
    """Variance over `n - correction`; NaN or inf where that leaves nothing, as in torch."""
    axes = axes_of(x, dims)
    count = math.prod(x.shape[axis] for axis in (range(x.ndim) if axes is None else axes))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    total = jnp.sum(jnp.square(jnp.abs(centred)), axis=axes, keepdims=keepdim)
    return (total / max(count - (1 if correction is None else correction), 0)).astype(x.real.dtype)


def var_flag(x: jax.Array, dims: Any = None, unbiased: bool = True, keepdim: bool = False) -> jax.Array:
    """`var` with its older parameter."""
    if isinstance(dims, bool):
        return var(x, None, int(dims))
    return var(x, dims, int(unbiased), keepdim)


def std(x: jax.Array, dims: Any = None, correction: float | None = 1, keepdim: bool = False) -> jax.Array:
    """Standard deviation."""
    return jnp.sqrt(var(x, dims, correction, keepdim))


def std_flag(x: jax.Array, dims: Any = None, unbiased: bool = True, keepdim: bool = False) -> jax.Array:
    """`std` with its older parameter."""
    return jnp.sqrt(var_flag(x, dims, unbiased, keepdim))


def var_mean(
    x: jax.Array, dims: Any = None, correction: float | None = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Variance and mean."""
    return var(x, dims, correction, keepdim), mean(x, dims, keepdim)


def std_mean(
    x: jax.Array, dims: Any = None, correction: float | None = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Standard deviation and mean."""
    return std(x, dims, correction, keepdim), mean(x, dims, keepdim)


def amax(x: jax.Array, dims: Dims = None, keepdim: bool = False) -> jax.Array:
    """Largest."""
    return jnp.max(x, axis=axes_of(x, dims), keepdims=keepdim)


def amin(x: jax.Array, dims: Dims = None, keepdim: bool = False) -> jax.Array:
    """Smallest."""
    return jnp.min(x, axis=axes_of(x, dims), keepdims=keepdim)


def aminmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest."""
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


def argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Position of the largest; in the flattened tensor where no dim is given."""
    return _position(jnp.argmax, x, dim, keepdim)


def argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Position of the smallest."""
    return _position(jnp.argmin, x, dim, keepdim)


def _position(function: Callable[..., Any], x: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), jnp.int32)
    return function(x, axis=dim, keepdims=keepdim).astype(jnp.int32)


def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Largest along a dim, and its position."""
    return _extreme(x, argmax(x, dim, True), dim, keepdim)


def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Smallest along a dim, and its position."""
    return _extreme(x, argmin(x, dim, True), dim, keepdim)


def _extreme(x: jax.Array, index: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, index
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


def any_(x: jax.Array, dims: Dims = None, keepdim: bool = False) -> jax.Array:
    """Whether one is not zero."""
    return jnp.any(x != 0, axis=axes_of(x, dims), keepdims=keepdim)


def all_(x: jax.Array, dims: Dims = None, keepdim: bool = False) -> jax.Array:
    """Whether none is zero."""
    return jnp.all(x != 0, axis=axes_of(x, dims), keepdims=keepdim)


def count_nonzero(x: jax.Array, dims: Dims = None) -> jax.Array:
    """How many are not zero."""
    return jnp.sum(x != 0, axis=axes_of(x, dims), dtype=jnp.int32)


def logsumexp(x: jax.Array, dims: Dims, keepdim: bool = False) -> jax.Array:
    """`log(sum(exp(x)))`."""
    return jax.nn.logsumexp(x, axis=axes_of(x, dims), keepdims=keepdim)


def vector_norm(x: jax.Array, order: Any = 2, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """`sum(|x| ** order) ** (1 / order)` over the dims; inf, -inf and 0 as limits."""
    (x,) = promote_float(x)
    x = x if dtype is None else x.astype(dtype)
    axes, order = axes_of(x, dims), float(order)
    magnitude = jnp.abs(x)
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(magnitude, axis=axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim).astype(x.dtype)
    if order == 1:
        return jnp.sum(magnitude, axis=axes, keepdims=keepdim)
    if order == 2:
        total = jnp.sum(jnp.square(magnitude), axis=axes, keepdims=keepdim)
        # torch's gradient at zero is zero; the root's own is infinite.
        return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    return jnp.sum(magnitude**order, axis=axes, keepdims=keepdim) ** (1 / order)


def norm(x: jax.Array, order: Any = 2, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    """`vector_norm` under its older name; no order means 2."""
    return vector_norm(x, 2 if order is None else order, dims, keepdim, dtype)


def softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Shares along a dim. A row of -inf alone gives NaN, as in torch."""
    wide = x.astype(jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32))
    return jax.nn.softmax(wide, axis=dim).astype(_soft_dtype(x, dtype))


def softmax_half(x: jax.Array, dim: int, _half_to_float: bool) -> jax.Array:
    """As `softmax`, by the name the core set gives it."""
    return softmax(x, dim)


def log_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Logarithms of `softmax`."""
    wide = x.astype(jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32))
    return jax.nn.log_softmax(wide, axis=dim).astype(_soft_dtype(x, dtype))


def log_softmax_half(x: jax.Array, dim: int, _half_to_float: bool) -> jax.Array:
    """As `log_softmax`, by the name the core set gives it."""
    return log_softmax(x, dim)


def _soft_dtype(x: jax.Array, dtype: Any) -> Any:
    if dtype is not None:
        return dtype
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32


def safe_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """As `softmax`; a row of -inf alone gives zeros."""
    wide = x.astype(jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32))
    top = jax.lax.stop_gradient(jnp.max(wide, axis=dim, keepdims=True))
    shares = jnp.exp(wide - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(shares, axis=dim, keepdims=True)
    return (shares / jnp.where(total == 0, 1, total)).astype(_soft_dtype(x, dtype))


def cumsum(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Running sum."""
    return x if x.ndim == 0 else jnp.cumsum(_counted(x, dtype), axis=dim)


def cumprod(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Running product."""
    return x if x.ndim == 0 else jnp.cumprod(_counted(x, dtype), axis=dim)


def diff(x: jax.Array, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> jax.Array:
    """Differences of neighbours, `n` times over."""
    return jnp.diff(x, n=n, axis=dim, prepend=prepend, append=append)


def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    """Running `logsumexp`."""
    return jax.lax.cumlogsumexp(x, axis=dim % x.ndim)


def cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running maximum, and the position of its last equal."""
    axis = dim % x.ndim
    values = jax.lax.cummax(x, axis=axis)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return values, jax.lax.cummax(jnp.where(x == values, places, 0), axis=axis)


def cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running minimum, and the position of its last equal."""
    axis = dim % x.ndim
    values = jax.lax.cummin(x, axis=axis)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return values, jax.lax.cummax(jnp.where(x == values, places, 0), axis=axis)


REDUCTION: Mapping[str, Callable[..., Any]] = {
    **overloads("sum", sum_, "default", "dim_IntList"),
    **overloads("nansum", nansum, "default"),
    **overloads("mean", mean, "default", "dim"),
    **overloads("prod", prod, "default", "dim_int"),
    **overloads("var", var, "correction"),
    **overloads("var", var_flag, "default", "dim"),
    **overloads("std", std, "correction"),
    **overloads("std", std_flag, "default", "dim"),
    **overloads("var_mean", var_mean, "correction"),
    **overloads("std_mean", std_mean, "correction"),
    **overloads("amax", amax, "default"),
    **overloads("amin", amin, "default"),
    **overloads("aminmax", aminmax, "default"),
    **overloads("max", amax, "default"),
    **overloads("min", amin, "default"),
    **overloads("max", max_dim, "dim"),
    **overloads("min", min_dim, "dim"),
    **overloads("argmax", argmax, "default"),
    **overloads("argmin", argmin, "default"),
    **overloads("any", any_, "default", "dim", "dims"),
    **overloads("all", all_, "default", "dim", "dims"),
    **overloads("count_nonzero", count_nonzero, "default", "dim_IntList"),
    **overloads("logsumexp", logsumexp, "default"),
    **overloads("linalg_vector_norm", vector_norm, "default"),
    **overloads("norm", norm, "Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype"),
    **overloads("softmax", softmax, "int"),
    **overloads("special_softmax", softmax, "default"),
    **overloads("_softmax", softmax_half, "default"),
    **overloads("log_softmax", log_softmax, "int"),
    **overloads("_log_softmax", log_softmax_half, "default"),
    **overloads("_safe_softmax", safe_softmax, "default"),
    **overloads("cumsum", cumsum, "default"),
    **overloads("cumprod", cumprod, "default"),
    **overloads("diff", diff, "default"),
    **overloads("logcumsumexp", logcumsumexp, "default"),
    **overloads("cummax", cummax, "default"),
    **overloads("cummin", cummin, "default"),
}
