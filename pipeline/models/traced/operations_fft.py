"""ATen Fourier transforms.

Owns the transforms and their scaling. Knows nothing of programs. The one decision: torch's number for a scaling (0
none, 1 by the root, 2 by the size) becomes a factor on an unscaled transform.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def _factor(sizes: Sequence[int], normalization: int) -> float:
    count = math.prod(sizes)
    return (1.0, 1 / math.sqrt(count), 1 / count)[normalization]


def fft_c2c(x: jax.Array, dims: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    """Complex to complex over several dims."""
    axes = tuple(dims)
    sizes = [x.shape[axis] for axis in axes]
    y = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes) * math.prod(sizes)
    return y * _factor(sizes, normalization)


def fft_r2c(x: jax.Array, dims: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    """Real to complex; half of the last dim where one side is asked for."""
    axes = tuple(dims)
    factor = _factor([x.shape[axis] for axis in axes], normalization)
    return (jnp.fft.rfftn(x, axes=axes) if onesided else jnp.fft.fftn(x, axes=axes)) * factor


def fft_c2r(x: jax.Array, dims: Sequence[int], normalization: int, last_size: int) -> jax.Array:
    """Complex to real, from half of the last dim."""
    axes = tuple(dims)
    sizes = [*(x.shape[axis] for axis in axes[:-1]), last_size]
    return jnp.fft.irfftn(x, s=sizes, axes=axes) * math.prod(sizes) * _factor(sizes, normalization)


def _one(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda x, n=None, dim=-1, norm=None: function(x, n=n, axis=dim, norm=norm)


def _two(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda x, s=None, dim=(-2, -1), norm=None: function(x, s=s, axes=tuple(dim), norm=norm)


def _many(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda x, s=None, dim=None, norm=None: function(x, s=s, axes=None if dim is None else tuple(dim), norm=norm)


def fftshift(x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """Zero frequency to the middle."""
    return jnp.fft.fftshift(x, axes=None if dims is None else tuple(dims))


def ifftshift(x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """Undoes `fftshift`."""
    return jnp.fft.ifftshift(x, axes=None if dims is None else tuple(dims))


_NAMES = ("fft", "ifft", "rfft", "irfft")

FFT: Mapping[str, Callable[..., Any]] = {
    "aten._fft_c2c.default": fft_c2c,
    "aten._fft_r2c.default": fft_r2c,
    "aten._fft_c2r.default": fft_c2r,
    **{f"aten.fft_{name}.default": _one(getattr(jnp.fft, name)) for name in (*_NAMES, "hfft", "ihfft")},
    **{f"aten.fft_{name}2.default": _two(getattr(jnp.fft, f"{name}2")) for name in _NAMES},
    **{f"aten.fft_{name}n.default": _many(getattr(jnp.fft, f"{name}n")) for name in _NAMES},
    "aten.fft_fftshift.default": fftshift,
    "aten.fft_ifftshift.default": ifftshift,
}
