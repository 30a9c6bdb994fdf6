"""ATen operations that make tensors from sizes and numbers.

Owns fills and ranges. Knows nothing of programs. The one decision: sizes are plain numbers by the time they come here,
read from the inputs' shapes, so everything made here is a constant to XLA.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.traced.dtypes import DEFAULT_FLOAT, cast, jax_dtype


def full(size: Sequence[int], value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    """`value` everywhere; its own dtype where none is given."""
    return jnp.full(tuple(size), cast(value, jax_dtype(value) if dtype is None else dtype))


def zeros(size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Zeros."""
    return jnp.zeros(tuple(size), DEFAULT_FLOAT if dtype is None else dtype)


def ones(size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Ones."""
    return jnp.ones(tuple(size), DEFAULT_FLOAT if dtype is None else dtype)


def full_like(x: jax.Array, value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    """`value` in the shape of `x`."""
    dtype = x.dtype if dtype is None else dtype
    return jnp.full(x.shape, cast(value, dtype))


def zeros_like(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    """Zeros in the shape of `x`."""
    return jnp.zeros(x.shape, x.dtype if dtype is None else dtype)


def ones_like(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    """Ones in the shape of `x`."""
    return jnp.ones(x.shape, x.dtype if dtype is None else dtype)


def new_full(x: jax.Array, size: Sequence[int], value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    """`value` everywhere, in the dtype of `x`."""
    return full(size, value, x.dtype if dtype is None else dtype)


def new_zeros(x: jax.Array, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Zeros in the dtype of `x`; what torch leaves uninitialised is zero as well."""
    return zeros(size, x.dtype if dtype is None else dtype)


def new_ones(x: jax.Array, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Ones in the dtype of `x`."""
    return ones(size, x.dtype if dtype is None else dtype)


def empty_permuted(size: Sequence[int], _order: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    """Zeros; a memory order has no meaning here."""
    return zeros(size, dtype)


def new_empty_strided(
    x: jax.Array, size: Sequence[int], _stride: Sequence[int], dtype: Any = None, **_: Any
) -> jax.Array:
    """Zeros; strides have no meaning here."""
    return new_zeros(x, size, dtype)


def arange(*limits: Any, dtype: Any = None, **_: Any) -> jax.Array:
    """`[start,] end[, step]`, `end` excluded; integers unless a limit is a float.

    The number of elements is torch's: `ceil((end - start) / step)` in double precision.
    """
    start, end, step = (0, limits[0], 1) if len(limits) == 1 else (*limits[:2], limits[2] if len(limits) > 2 else 1)
    if dtype is None:
        is_whole = all(isinstance(limit, int | np.integer) for limit in (start, end, step))
        dtype = jnp.dtype(jnp.int32) if is_whole else jnp.dtype(DEFAULT_FLOAT)
    num = max(0, int(np.ceil((end - start) / step)))
    index = jax.lax.iota(jnp.int32, num)
    if jnp.issubdtype(dtype, jnp.integer):
        return (int(start) + index * int(step)).astype(dtype)
    return (start + index.astype(jnp.float32) * step).astype(dtype)


def linspace(start: Any, end: Any, steps: int, dtype: Any = None, **_: Any) -> jax.Array:
    """`steps` numbers from `start` to `end`, both included."""
    made = jnp.linspace(start, end, steps, dtype=jnp.float32)
    return made.astype(DEFAULT_FLOAT if dtype is None else dtype)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, dtype: Any = None, **_: Any) -> jax.Array:
    """`base` to the powers of `linspace`."""
    return jnp.power(base, linspace(start, end, steps)).astype(DEFAULT_FLOAT if dtype is None else dtype)


def eye(rows: int, columns: Any = None, dtype: Any = None, **_: Any) -> jax.Array:
    """Ones on the diagonal."""
    return jnp.eye(rows, columns, dtype=DEFAULT_FLOAT if dtype is None else dtype)


def scalar_tensor(value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    """A tensor without dimensions."""
    return cast(value, DEFAULT_FLOAT if dtype is None else dtype)


def tril_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None, **_: Any) -> jax.Array:
    """Rows and columns of the lower triangle, [2, N]."""
    return jnp.asarray(np.stack(np.tril_indices(rows, offset, columns)), dtype or jnp.int32)


def triu_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None, **_: Any) -> jax.Array:
    """Rows and columns of the upper triangle, [2, N]."""
    return jnp.asarray(np.stack(np.triu_indices(rows, offset, columns)), dtype or jnp.int32)


def fftfreq(count: int, spacing: float = 1.0, dtype: Any = None, **_: Any) -> jax.Array:
    """Frequencies of a Fourier transform."""
    return jnp.asarray(np.fft.fftfreq(count, spacing), DEFAULT_FLOAT if dtype is None else dtype)


def rfftfreq(count: int, spacing: float = 1.0, dtype: Any = None, **_: Any) -> jax.Array:
    """Frequencies of the transform of real numbers."""
    return jnp.asarray(np.fft.rfftfreq(count, spacing), DEFAULT_FLOAT if dtype is None else dtype)


def window(values: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A window of `length` samples, periodic unless told otherwise."""

    def made(length: int, periodic: bool = True, *_: Any, dtype: Any = None, **__: Any) -> jax.Array:
        angle = 2 * np.pi * np.arange(length) / max(length if periodic else length - 1, 1)
        return jnp.asarray(values(angle), DEFAULT_FLOAT if dtype is None else dtype)

    return made


CREATION: Mapping[str, Callable[..., Any]] = {
    "aten.full.default": full,
    "aten.full_like.default": full_like,
    "aten.fill.Scalar": full_like,
    "aten.fill.Tensor": full_like,
    "aten.zeros.default": zeros,
    "aten.ones.default": ones,
    "aten.empty.memory_format": zeros,
    "aten.empty_permuted.default": empty_permuted,
    "aten.empty_strided.default": empty_permuted,
    "aten.zeros_like.default": zeros_like,
    "aten.zero.default": zeros_like,
    "aten.ones_like.default": ones_like,
    "aten.empty_like.default": zeros_like,
    "aten.new_full.default": new_full,
    "aten.new_zeros.default": new_zeros,
    "aten.new_empty.default": new_zeros,
    "aten.new_empty_strided.default": new_empty_strided,
    "aten.new_ones.default": new_ones,
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.linspace.default": linspace,
    "aten.logspace.default": logspace,
    "aten.eye.default": eye,
    "aten.eye.m": eye,
    "aten.scalar_tensor.default": scalar_tensor,
    "aten.tril_indices.default": tril_indices,
    "aten.triu_indices.default": triu_indices,
    "aten.fft_fftfreq.default": fftfreq,
    "aten.fft_rfftfreq.default": rfftfreq,
    "aten.hann_window.default": window(lambda angle: 0.5 - 0.5 * np.cos(angle)),
    "aten.hann_window.periodic": window(lambda angle: 0.5 - 0.5 * np.cos(angle)),
    "aten.hamming_window.default": window(lambda angle: 0.54 - 0.46 * np.cos(angle)),
    "aten.hamming_window.periodic": window(lambda angle: 0.54 - 0.46 * np.cos(angle)),
}
