"""ATen operations that order elements.

Owns sorting and selection by rank. Knows nothing of programs. The one decision: every order is stable, which torch only
promises where it is asked to; where values are equal, torch's indices are not defined and may differ.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def argsort(x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool = True) -> jax.Array:
    """Positions in ascending or descending order; equal elements keep theirs."""
    if x.ndim == 0:
        return jnp.zeros((), jnp.int32)
    return jnp.argsort(x, axis=dim, descending=descending, stable=True).astype(jnp.int32)


def argsort_stable(x: jax.Array, *, stable: bool, dim: int = -1, descending: bool = False) -> jax.Array:
    """As `argsort`."""
    return argsort(x, dim, descending)


def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Elements in order, and their positions."""
    order = argsort(x, dim, descending)
    return (x, order) if x.ndim == 0 else (jnp.take_along_axis(x, order, axis=dim), order)


def sort_stable(
    x: jax.Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `sort`."""
    return sort(x, dim, descending)


def topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted_: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The k largest or smallest along a dim, in order, and their positions."""
    if largest and x.dtype != jnp.bool_:
        values, places = jax.lax.top_k(jnp.moveaxis(x, dim, -1), k)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim).astype(jnp.int32)
    values, places = sort(x, dim, largest)
    return jax.lax.slice_in_dim(values, 0, k, axis=dim), jax.lax.slice_in_dim(places, 0, k, axis=dim)


def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The k-th smallest along a dim, counted from 1, and its position."""
    values, places = sort(x, dim)
    picked = (jax.lax.index_in_dim(part, k - 1, axis=dim, keepdims=keepdim) for part in (values, places))
    value, place = picked
    return value, place


def median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The lower median along a dim, and its position."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def median(x: jax.Array) -> jax.Array:
    """The lower median of all."""
    return jnp.sort(x.reshape(-1))[(x.size - 1) // 2]


def msort(x: jax.Array) -> jax.Array:
    """Sorted along the first dim."""
    return jnp.sort(x, axis=0)


SORTING: Mapping[str, Callable[..., Any]] = {
    "aten.argsort.default": argsort,
    "aten.argsort.stable": argsort_stable,
    "aten.sort.default": sort,
    "aten.sort.stable": sort_stable,
    "aten.topk.default": topk,
    "aten.kthvalue.default": kthvalue,
    "aten.median.default": median,
    "aten.median.dim": median_dim,
    "aten.msort.default": msort,
}
