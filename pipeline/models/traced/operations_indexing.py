"""ATen operations that read and write by index.

Owns gathers, scatters, embeddings and masked writes. Knows nothing of programs. The one decision: an index may be
negative, as in torch; one out of range, which torch refuses, is clamped on reads and dropped on writes, because a
compiled program cannot raise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.traced.dtypes import cast


def embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    _scale_grad: bool = False,
    _sparse: bool = False,
) -> jax.Array:
    """Rows of `weight`; the row `padding_idx` gets no gradient."""
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    """Advanced indexing, one index a dim, None for a whole dim."""
    return jnp.asarray(x)[  # a small constant is a numpy array, which takes no traced index
        tuple(slice(None) if part is None else part for part in indices)
    ]


def index_put(
    x: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array, accumulate: bool = False
) -> jax.Array:
    """`x` with the indexed elements replaced, or added to."""
    values = values.astype(x.dtype)
    masks = [part for part in indices if part is not None and part.dtype == jnp.bool_]
    if masks and len([part for part in indices if part is not None]) == 1:
        return _masked_put(x, list(indices), values, accumulate)
    place = jnp.asarray(x).at[tuple(slice(None) if part is None else part for part in indices)]
    return place.add(values) if accumulate else place.set(values)


def _masked_put(x: jax.Array, indices: list[Any], values: jax.Array, accumulate: bool) -> jax.Array:
    """One boolean mask over the dims from its place in `indices` on; the shape stays known under jit."""
    first = next(number for number, part in enumerate(indices) if part is not None)
    mask = indices[first]
    after = x.ndim - first - mask.ndim
    spread = mask.reshape((1,) * first + mask.shape + (1,) * after)
    # One value for all places, or one for each row of a trailing shape: the rest is one value for each true element.
    if values.ndim <= after or values.size == 1:
        filled = jnp.broadcast_to(values.reshape(()) if values.size == 1 else values, x.shape)
    else:
        flat = values.reshape((*values.shape[:first], -1, *values.shape[first + 1 :]))
        order = jnp.clip(jnp.cumsum(mask.reshape(-1)) - 1, 0, flat.shape[first] - 1)
        filled = jnp.take(flat, order, axis=first).reshape(x.shape)
    return jnp.where(spread, x + filled if accumulate else filled, x)


def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The true places filled with the elements of `source` in order."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    mask = jnp.broadcast_to(mask, shape)
    order = jnp.clip(jnp.cumsum(mask.reshape(-1)) - 1, 0, max(source.size - 1, 0))
    filled = source.reshape(-1)[order].reshape(shape).astype(x.dtype)
    return jnp.where(mask, filled, x)


def index_select(x: jax.Array, dim: int, indices: jax.Array) -> jax.Array:
    """Slices along a dim, in the order of the indices."""
    return jnp.take(x, indices, axis=dim, mode="clip") if x.ndim else x


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Elements of the flattened tensor."""
    return x.reshape(-1)[indices]


def gather(x: jax.Array, dim: int, indices: jax.Array, sparse_grad: bool = False) -> jax.Array:
    """`out[i][j] = x[indices[i][j]][j]` for dim 0; the index may be smaller than x in the other dims."""
    return x.reshape(1)[indices.reshape(-1)].reshape(indices.shape) if x.ndim == 0 else x[_grid(dim, indices)]


def take_along_dim(x: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
    """As `gather`, broadcast in the other dims."""
    return jnp.take_along_axis(x, indices, axis=dim)


def _grid(dim: int, indices: jax.Array) -> tuple[Any, ...]:
    """The full index of every element that `indices` names along `dim`."""
    dim = dim % indices.ndim
    return tuple(
        indices if axis == dim else np.arange(size).reshape((-1,) + (1,) * (indices.ndim - axis - 1))
        for axis, size in enumerate(indices.shape)
    )


def _cut(source: Any, indices: jax.Array, dtype: Any) -> jax.Array:
    """The part of `source` that belongs to the indices; a number stands for all."""
    if not hasattr(source, "shape") or source.ndim == 0:
        return jnp.broadcast_to(cast(source, dtype), indices.shape)
    return source[tuple(slice(0, size) for size in indices.shape)].astype(dtype)


def scatter(x: jax.Array, dim: int, indices: jax.Array, source: Any, reduce: str | None = None) -> jax.Array:
    """`x[indices[i][j]][j] = source[i][j]` for dim 0, or added or multiplied."""
    if x.ndim == 0:
        return scatter(x.reshape(1), 0, indices.reshape(-1), jnp.reshape(source, -1), reduce).reshape(())
    place = x.at[_grid(dim, indices)]
    values = _cut(source, indices, x.dtype)
    if reduce is None:
        return place.set(values)
    return place.add(values) if reduce == "add" else place.multiply(values)


def scatter_add(x: jax.Array, dim: int, indices: jax.Array, source: jax.Array) -> jax.Array:
    """`x[indices[i][j]][j] += source[i][j]` for dim 0."""
    return scatter(x, dim, indices, source, "add")


def scatter_reduce(
    x: jax.Array, dim: int, indices: jax.Array, source: jax.Array, reduce: str, include_self: bool = True
) -> jax.Array:
    """`scatter` by sum, product, mean or extreme; without `include_self` the old values of hit places do not count."""
    grid, values = _grid(dim, indices), _cut(source, indices, x.dtype)
    is_hit = jnp.zeros(x.shape, jnp.bool_).at[grid].set(True)
    neutral: Mapping[str, Any] = {"sum": 0, "mean": 0, "prod": 1, "amax": _low(x.dtype), "amin": _high(x.dtype)}
    start = x if include_self else jnp.where(is_hit, jnp.asarray(neutral[reduce], x.dtype), x)
    place = start.at[grid]
    if reduce in ("amax", "amin"):
        return place.max(values) if reduce == "amax" else place.min(values)
    if reduce == "prod":
        return place.multiply(values)
    total = place.add(values)
    if reduce == "sum":
        return total
    counts = jnp.zeros(x.shape, x.dtype).at[grid].add(1) + int(include_self)
    counts = jnp.maximum(counts, 1)
    return total / counts if jnp.issubdtype(x.dtype, jnp.floating) else jnp.floor_divide(total, counts)


def _low(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _high(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _along(x: jax.Array, dim: int, indices: jax.Array) -> Any:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = indices
    return x.at[tuple(place)]


def index_add(x: jax.Array, dim: int, indices: jax.Array, source: jax.Array, alpha: Any = 1) -> jax.Array:
    """Slices of `source` added to the indexed slices."""
    return _along(x, dim, indices).add((alpha * source).astype(x.dtype))


def index_copy(x: jax.Array, dim: int, indices: jax.Array, source: jax.Array) -> jax.Array:
    """Slices of `source` in place of the indexed ones."""
    return _along(x, dim, indices).set(source.astype(x.dtype))


def index_fill(x: jax.Array, dim: int, indices: jax.Array, value: Any) -> jax.Array:
    """One value in the indexed slices."""
    return _along(x, dim, indices).set(cast(value, x.dtype))


def put(x: jax.Array, indices: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """Elements of the flattened tensor replaced, or added to."""
    place = x.reshape(-1).at[indices.reshape(-1)]
    values = source.reshape(-1).astype(x.dtype)
    return (place.add(values) if accumulate else place.set(values)).reshape(x.shape)


def one_hot(x: jax.Array, num_classes: int) -> jax.Array:
    """Ones at the class of each element, in a last dim."""
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


def isin(x: Any, candidates: Any, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    """Whether each element is among the candidates."""
    return jnp.isin(x, candidates, invert=invert)


def bucketize(x: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    """The bucket of each element."""
    return jnp.searchsorted(boundaries, jnp.asarray(x), side="right" if right else "left").astype(jnp.int32)


def searchsorted(
    sequence: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """Where each element would keep the last dim of `sequence` sorted."""
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    wanted = "right" if right or side == "right" else "left"
    x = jnp.asarray(x)
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, x, side=wanted).astype(jnp.int32)
    lead = sequence.shape[:-1]
    rows = jax.vmap(lambda row, values: jnp.searchsorted(row, values, side=wanted))
    found = rows(sequence.reshape(math.prod(lead), -1), x.reshape(math.prod(lead), -1))
    return found.reshape(x.shape).astype(jnp.int32)


def embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    _scale_grad: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sum, mean or maximum of the rows of each bag; torch's three buffers after it are empty here."""
    num_bags = offsets.shape[0] - int(include_last_offset)
    bags = jnp.searchsorted(offsets[:num_bags], jnp.arange(indices.shape[0]), side="right") - 1
    rows = embedding(weight, indices, padding_idx)
    counted = jnp.ones(indices.shape, weight.dtype) if padding_idx < 0 else (indices != padding_idx)
    if weights is not None:
        rows = rows * weights[:, None]
    empty = jnp.zeros((0,), jnp.int32)
    if mode == 2:
        top = jnp.where(counted.astype(jnp.bool_)[:, None], rows, -jnp.inf)
        most = jax.ops.segment_max(top, bags, num_bags)
        return jnp.where(jnp.isfinite(most), most, 0), empty, empty, empty
    total = jax.ops.segment_sum(rows * counted.astype(rows.dtype)[:, None], bags, num_bags)
    if mode == 1:
        total = total / jnp.maximum(jax.ops.segment_sum(counted.astype(rows.dtype), bags, num_bags), 1)[:, None]
    return total, empty, empty, empty


INDEXING: Mapping[str, Callable[..., Any]] = {
    "aten.embedding.default": embedding,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten.masked_scatter.default": masked_scatter,
    "aten.index_select.default": index_select,
    "aten.take.default": take,
    "aten.take_along_dim.default": take_along_dim,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter,
    "aten.scatter.reduce": scatter,
    "aten.scatter.value_reduce": scatter,
    "aten.scatter_add.default": scatter_add,
    "aten.scatter_reduce.two": scatter_reduce,
    "aten.index_add.default": index_add,
    "aten.index_copy.default": index_copy,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.put.default": put,
    "aten.one_hot.default": one_hot,
    "aten.isin.Tensor_Tensor": isin,
    "aten.isin.Tensor_Scalar": isin,
    "aten.isin.Scalar_Tensor": isin,
    "aten.bucketize.Tensor": bucketize,
    "aten.bucketize.Scalar": bucketize,
    "aten.searchsorted.Tensor": searchsorted,
    "aten.searchsorted.Scalar": searchsorted,
}
