"""ATen operations that move elements without computing.

Owns views, joins and splits. Knows nothing of programs. The one decision: views are values here; that torch
shares memory between them does not matter in a functional graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.traced.dtypes import cast, promote, promoted_dtype
from pipeline.models.traced.overloads import overloads


def view(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Another shape; one size may be -1."""
    return x.reshape(tuple(size))


def view_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """The same bits as another dtype of the same width."""
    return jax.lax.bitcast_convert_type(x, dtype)


def permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Dims in another order."""
    return jnp.transpose(x, tuple(dims))


def transpose(x: jax.Array, first: int, second: int) -> jax.Array:
    """Two dims exchanged."""
    return x if x.ndim == 0 else jnp.swapaxes(x, first, second)


def t(x: jax.Array) -> jax.Array:
    """A matrix transposed; a vector itself."""
    return x.T


def matrix_transpose(x: jax.Array) -> jax.Array:
    """The last two dims exchanged."""
    return jnp.swapaxes(x, -1, -2)


def squeeze(x: jax.Array, dims: int | Sequence[int] | None = None) -> jax.Array:
    """Without its dims of size one, or those among `dims`."""
    if x.ndim == 0:
        return x
    axes = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(axis % x.ndim for axis in axes if x.shape[axis] == 1))


def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    """With one more dim of size one."""
    return jnp.expand_dims(x, dim)


def expand(x: jax.Array, size: Sequence[int], implicit: bool = False) -> jax.Array:
    """Dims of size one repeated; -1 keeps a size."""
    lead = len(size) - x.ndim
    known = (*(1 for _ in range(lead)), *x.shape)
    return jnp.broadcast_to(x, tuple(old if new == -1 else new for old, new in zip(known, size, strict=True)))


def expand_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """In the shape of `other`."""
    return jnp.broadcast_to(x, other.shape)


def view_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """The same elements in the shape of `other`."""
    return x.reshape(other.shape)


def repeat(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Whole copies along each dim."""
    return jnp.tile(x, tuple(counts))


def repeat_interleave(x: jax.Array, repeats: int, dim: int | None = None, output_size: Any = None) -> jax.Array:
    """Each element several times in a row."""
    return jnp.repeat(x, repeats, axis=dim)


def repeat_interleave_tensor(
    x: jax.Array, repeats: jax.Array, dim: int | None = None, output_size: int | None = None
) -> jax.Array:
    """Each element its own number of times; the total must be known."""
    return jnp.repeat(x, repeats, axis=dim, total_repeat_length=output_size)


def cat(parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Joined along a dim; torch passes over empty vectors."""
    kept = [part for part in parts if part.shape != (0,)] or list(parts)[:1]
    dtype = promoted_dtype(parts)
    return jnp.concatenate([cast(part, dtype) for part in kept], axis=dim)


def stack(parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Joined along a new dim."""
    return jnp.stack(promote(*parts), axis=dim)


def split(x: jax.Array, size: int, dim: int = 0) -> list[jax.Array]:
    """Pieces of `size`; the last may be smaller."""
    total = x.shape[dim]
    return [jax.lax.slice_in_dim(x, at, min(at + size, total), axis=dim) for at in range(0, max(total, 1), size)]


def split_with_sizes(x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    """Pieces of these sizes."""
    ends = np.cumsum(np.asarray(sizes))
    return [jax.lax.slice_in_dim(x, int(end) - size, int(end), axis=dim) for end, size in zip(ends, sizes, strict=True)]


def chunk(x: jax.Array, count: int, dim: int = 0) -> list[jax.Array]:
    """At most `count` pieces of one size."""
    return split(x, max(-(-x.shape[dim] // count), 1), dim)


def tensor_split(x: jax.Array, sections: int, dim: int = 0) -> list[jax.Array]:
    """`sections` pieces whose sizes differ by one at most."""
    return list(jnp.array_split(x, sections, axis=dim))


def tensor_split_at(x: jax.Array, indices: Sequence[int], dim: int = 0) -> list[jax.Array]:
    """Pieces that end at these positions."""
    return list(jnp.split(x, list(indices), axis=dim))


def unbind(x: jax.Array, dim: int = 0) -> list[jax.Array]:
    """All slices along a dim."""
    return [jax.lax.index_in_dim(x, number, axis=dim, keepdims=False) for number in range(x.shape[dim])]


def select(x: jax.Array, dim: int, index: int) -> jax.Array:
    """One slice along a dim; negative counts from the end."""
    return jax.lax.index_in_dim(x, index, axis=dim % x.ndim, keepdims=False)


def slice_(x: jax.Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> jax.Array:
    """A range along a dim; ends beyond the size are cut, as in Python."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    """`length` slices from `start`."""
    return slice_(x, dim, start, start + length if start >= 0 else x.shape[dim] + start + length)


def slice_scatter(
    x: jax.Array, source: jax.Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> jax.Array:
    """`x` with a range replaced."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x.at[tuple(index)].set(source.astype(x.dtype))


def select_scatter(x: jax.Array, source: jax.Array, dim: int, index: int) -> jax.Array:
    """`x` with one slice replaced."""
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = index
    return x.at[tuple(place)].set(source.astype(x.dtype))


def diagonal_scatter(x: jax.Array, source: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """`x` with a diagonal replaced."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows = np.arange(source.shape[-1])
    written = moved.at[..., rows + max(-offset, 0), rows + max(offset, 0)].set(source.astype(x.dtype))
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Reversed along the dims."""
    return jnp.flip(x, tuple(dims))


def roll(x: jax.Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> jax.Array:
    """Shifted around; without dims the flattened tensor is."""
    if not isinstance(dims, int) and not dims:
        shift = shifts if isinstance(shifts, int) else shifts[0]
        return jnp.roll(x, shift)
    return jnp.roll(x, shifts, dims)


def movedim(x: jax.Array, source: int | Sequence[int], target: int | Sequence[int]) -> jax.Array:
    """Dims moved to other places."""
    return jnp.moveaxis(x, source, target)


def flatten(x: jax.Array, start: int = 0, end: int = -1) -> jax.Array:
    """A run of dims as one."""
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start % x.ndim, end % x.ndim
    return x.reshape((*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def unflatten(x: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    """One dim as several; one size may be -1."""
    dim = dim % x.ndim
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // max(-math.prod(sizes), 1)
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def unfold(x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    """Windows of `size` along a dim, in a last dim of their own."""
    dim = dim % x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, jnp.asarray(starts[:, None] + np.arange(size)), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """The diagonal of two dims, in a last dim."""
    return jnp.diagonal(x, offset, dim1, dim2)


def diag(x: jax.Array, offset: int = 0) -> jax.Array:
    """A matrix from its diagonal, or the diagonal of a matrix."""
    return jnp.diag(x, offset)


def diag_embed(x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    """Matrices whose diagonals are the last dim."""
    size = x.shape[-1] + abs(offset)
    rows = np.arange(x.shape[-1])
    made = jnp.zeros((*x.shape[:-1], size, size), x.dtype)
    made = made.at[..., rows + max(-offset, 0), rows + max(offset, 0)].set(x)
    return jnp.moveaxis(made, (-2, -1), (dim1, dim2))


def tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The lower triangle."""
    return jnp.tril(x, diagonal)


def triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The upper triangle."""
    return jnp.triu(x, diagonal)


def broadcast_tensors(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """All in their common shape."""
    return list(jnp.broadcast_arrays(*parts))


def meshgrid(parts: Sequence[jax.Array], indexing: str = "ij") -> list[jax.Array]:
    """Coordinates of a grid."""
    return list(jnp.meshgrid(*parts, indexing=indexing))


def as_strided(x: jax.Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> jax.Array:
    """Elements of the contiguous tensor by their distance in memory."""
    places = np.full((), offset or 0)
    for length, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(length) * step
    return x.reshape(-1)[jnp.asarray(places)]


SHAPE: Mapping[str, Callable[..., Any]] = {
    **overloads("view", view, "default"),
    **overloads("view", view_dtype, "dtype"),
    **overloads("_unsafe_view", view, "default"),
    **overloads("reshape", view, "default"),
    **overloads("view_copy", view, "default"),
    **overloads("permute", permute, "default"),
    **overloads("permute_copy", permute, "default"),
    **overloads("transpose", transpose, "int"),
    **overloads("swapaxes", transpose, "default"),
    **overloads("swapdims", transpose, "default"),
    **overloads("t", t, "default"),
    **overloads("numpy_T", t, "default"),
    **overloads("mT", matrix_transpose, "default"),
    **overloads("squeeze", squeeze, "default", "dim", "dims"),
    **overloads("unsqueeze", unsqueeze, "default"),
    **overloads("expand", expand, "default"),
    **overloads("broadcast_to", expand, "default"),
    **overloads("expand_as", expand_as, "default"),
    **overloads("view_as", view_as, "default"),
    **overloads("reshape_as", view_as, "default"),
    **overloads("repeat", repeat, "default"),
    **overloads("tile", repeat, "default"),
    **overloads("repeat_interleave", repeat_interleave, "self_int"),
    **overloads("repeat_interleave", repeat_interleave_tensor, "self_Tensor"),
    **overloads("cat", cat, "default"),
    **overloads("concat", cat, "default"),
    **overloads("concatenate", cat, "default"),
    **overloads("stack", stack, "default"),
    **overloads("split", split, "Tensor"),
    **overloads("split", split_with_sizes, "sizes"),
    **overloads("split_with_sizes", split_with_sizes, "default"),
    **overloads("chunk", chunk, "default"),
    **overloads("tensor_split", tensor_split, "sections"),
    **overloads("tensor_split", tensor_split_at, "indices"),
    **overloads("unbind", unbind, "int"),
    **overloads("select", select, "int"),
    **overloads("slice", slice_, "Tensor"),
    **overloads("narrow", narrow, "default"),
    **overloads("slice_scatter", slice_scatter, "default"),
    **overloads("select_scatter", select_scatter, "default"),
    **overloads("diagonal_scatter", diagonal_scatter, "default"),
    **overloads("flip", flip, "default"),
    **overloads("roll", roll, "default"),
    **overloads("movedim", movedim, "int", "intlist"),
    **overloads("moveaxis", movedim, "int", "intlist"),
    **overloads("flatten", flatten, "using_ints"),
    **overloads("unflatten", unflatten, "int"),
    **overloads("unfold", unfold, "default"),
    **overloads("unfold_copy", unfold, "default"),
    **overloads("diagonal", diagonal, "default"),
    **overloads("diag", diag, "default"),
    **overloads("diag_embed", diag_embed, "default"),
    **overloads("tril", tril, "default"),
    **overloads("triu", triu, "default"),
    **overloads("broadcast_tensors", broadcast_tensors, "default"),
    **overloads("meshgrid", meshgrid, "default", "indexing"),
    **overloads("as_strided", as_strided, "default"),
}
