"""ATen pooling.

Owns maxima and means over windows, fixed and adaptive, and unfolding into columns. Knows nothing of programs. The one
decision: the size of the output is torch's rule (`ceil_mode` drops a last window that starts in the padding), and the
right padding is made to fit it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.traced.operations_convolution import Sizes, each_dim


def _window(
    shape: tuple[int, ...],
    kernel: Sizes,
    stride: Any,
    padding: Sizes,
    dilation: Sizes,
    *,
    ceil_mode: bool,
    num_dims: int,
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]], tuple[int, ...]]:
    """Kernel, stride, padding and dilation of the pooled dims; the right padding makes torch's output size."""
    kernels, pads = each_dim(kernel, num_dims), each_dim(padding, num_dims)
    strides = each_dim(stride, num_dims) if stride not in (None, [], ()) else kernels
    dilations = each_dim(dilation, num_dims)
    both, reached = [], []
    for size, k, s, p, d in zip(shape[-num_dims:], kernels, strides, pads, dilations, strict=True):
        reach = d * (k - 1) + 1
        room = size + 2 * p - reach
        count = (-(-room // s) if ceil_mode else room // s) + 1
        if ceil_mode and (count - 1) * s >= size + p:
            count -= 1
        if count == 1 and d == 1:
            # EfficientNet pools with a window of thousands over a few pixels, and only those count: XLA:CPU took two
            # minutes for the zeros around them.
            k = reach = min(k, size + 2 * p)
        reached.append(k)
        both.append((p, (count - 1) * s + reach - size - p))
    return tuple(reached), strides, both, dilations


def _reduced(
    x: Any, initial: Any, function: Any, window: tuple[Any, Any, list[tuple[int, int]], Any], lead: int
) -> Any:
    """An array (or several together) over its windows; `lead` dims come before them."""
    kernels, strides, pads, dilations = window
    # A negative right padding (a stride that leaves a rest) is a cut, which reduce_window makes by itself.
    return jax.lax.reduce_window(
        x,
        initial,
        function,
        window_dimensions=(1,) * lead + kernels,
        window_strides=(1,) * lead + strides,
        padding=[(0, 0)] * lead + [(low, max(high, 0)) for low, high in pads],
        window_dilation=(1,) * lead + dilations,
    )


def _lowest(dtype: Any) -> np.ndarray[Any, Any]:
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _max_pool(num_dims: int) -> Callable[..., jax.Array]:
    def pool(
        x: jax.Array,
        kernel: Sizes,
        stride: Any = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> jax.Array:
        window = _window(x.shape, kernel, stride, padding, dilation, ceil_mode=ceil_mode, num_dims=num_dims)
        if any(step > 1 for step in window[3]):
            return _dilated_max(x, window, num_dims)
        return _reduced(x, _lowest(x.dtype), jax.lax.max, window, x.ndim - num_dims)

    return pool


def _dilated_max(x: jax.Array, window: tuple[Any, Any, list[tuple[int, int]], Any], num_dims: int) -> jax.Array:
    """As a maximum over shifted cuts: XLA has no gradient for a dilated window."""
    kernels, strides, pads, dilations = window
    lead = x.ndim - num_dims
    padded = jax.lax.pad(x, _lowest(x.dtype), [(0, 0, 0)] * lead + [(low, max(high, 0), 0) for low, high in pads])
    area = padded.shape[lead:]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(area, kernels, strides, dilations, strict=True)]
    cuts = []
    for at in np.ndindex(*kernels):
        starts = [number * step for number, step in zip(at, dilations, strict=True)]
        index = [slice(a, a + (c - 1) * s + 1, s) for a, c, s in zip(starts, counts, strides, strict=True)]
        cuts.append(padded[(..., *index)])
    return jnp.max(jnp.stack(cuts), axis=0)


def _max_pool_with_indices(num_dims: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def pool(
        x: jax.Array,
        kernel: Sizes,
        stride: Any = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """The maxima, and their places in the flattened window dims; the first of equal ones."""
        values = _max_pool(num_dims)(x, kernel, stride, padding, dilation, ceil_mode)
        window = _window(x.shape, kernel, stride, padding, dilation, ceil_mode=ceil_mode, num_dims=num_dims)
        fixed = jax.lax.stop_gradient(x)
        area = x.shape[-num_dims:]
        places = jnp.broadcast_to(jnp.arange(math.prod(area), dtype=jnp.int32).reshape(area), x.shape)
        initial = (_lowest(x.dtype), np.asarray(np.iinfo(np.int32).max, np.int32))
        _, indices = _reduced((fixed, places), initial, _larger, window, x.ndim - num_dims)
        return values, indices

    return pool


def _larger(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    first_wins = (first[0] > second[0]) | ((first[0] == second[0]) & (first[1] < second[1]))
    return jnp.where(first_wins, first[0], second[0]), jnp.where(first_wins, first[1], second[1])


def _avg_pool(num_dims: int) -> Callable[..., jax.Array]:
    def pool(
        x: jax.Array,
        kernel: Sizes,
        stride: Any = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        window = _window(x.shape, kernel, stride, padding, 1, ceil_mode=ceil_mode, num_dims=num_dims)
        total = _reduced(x, np.zeros((), x.dtype), jax.lax.add, window, x.ndim - num_dims)
        if divisor_override is not None:
            return total / divisor_override
        # Padding that only ceil_mode asks for never counts; the declared padding counts if the flag says so.
        pads = each_dim(padding, num_dims)
        counted = np.ones(x.shape[-num_dims:], np.float32)
        if count_include_pad:
            counted = np.pad(counted, [(pad, pad) for pad in pads], constant_values=1)
            kernels, strides, both, dilations = window
            window = (kernels, strides, [(0, high - pad) for (_, high), pad in zip(both, pads, strict=True)], dilations)
        counts = _reduced(jnp.asarray(counted), np.zeros((), np.float32), jax.lax.add, window, 0)
        return (total / counts.astype(x.dtype)).astype(x.dtype)

    return pool


def _edges(size: int, count: int) -> list[tuple[int, int]]:
    """Windows of an adaptive pool: `floor(i size / count)` to `ceil((i + 1) size / count)`."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _adaptive_avg_pool(num_dims: int) -> Callable[..., jax.Array]:
    def pool(x: jax.Array, output_size: Sizes) -> jax.Array:
        for offset, wanted in enumerate(_wanted(x, output_size, num_dims)):
            axis = x.ndim - num_dims + offset
            size = x.shape[axis]
            if size % wanted == 0:
                shape = (*x.shape[:axis], wanted, size // wanted, *x.shape[axis + 1 :])
                x = jnp.mean(x.reshape(shape), axis=axis + 1)
                continue
            shares = np.zeros((wanted, size), np.float32)
            for number, (low, high) in enumerate(_edges(size, wanted)):
                shares[number, low:high] = 1 / (high - low)
            x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(shares, x.dtype), axes=((axis,), (1,))), -1, axis)
        return x

    return pool


def _adaptive_max_pool(num_dims: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def pool(x: jax.Array, output_size: Sizes) -> tuple[jax.Array, jax.Array]:
        """The maxima and their places in the flattened pooled dims."""
        wanted = _wanted(x, output_size, num_dims)
        area = x.shape[-num_dims:]
        places = jnp.broadcast_to(jnp.arange(math.prod(area), dtype=jnp.int32).reshape(area), x.shape)
        flat_values, flat_places = [], []
        edges = [_edges(size, count) for size, count in zip(area, wanted, strict=True)]
        for number in range(math.prod(wanted)):
            at = np.unravel_index(number, wanted)
            cut = (Ellipsis, *(slice(*edges[dim][int(i)]) for dim, i in enumerate(at)))
            flat = x[cut].reshape(*x.shape[:-num_dims], -1)
            best = jnp.argmax(flat, axis=-1, keepdims=True)
            flat_values.append(jnp.take_along_axis(flat, best, axis=-1))
            flat_places.append(jnp.take_along_axis(places[cut].reshape(flat.shape), best, axis=-1))
        shape = (*x.shape[:-num_dims], *wanted)
        joined = (jnp.concatenate(parts, axis=-1).reshape(shape) for parts in (flat_values, flat_places))
        values, indices = joined
        return values, indices

    return pool


def _wanted(x: jax.Array, output_size: Any, num_dims: int) -> tuple[int, ...]:
    sizes = each_dim(output_size, num_dims)
    return tuple(size if wanted is None else wanted for wanted, size in zip(sizes, x.shape[-num_dims:], strict=True))


def unfold_columns(x: jax.Array, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> jax.Array:
    """[B, C, H, W] to [B, C k k, L]: every window as a column."""
    batched = x if x.ndim == 4 else x[None]
    kernels, strides, dilations, pads = (each_dim(value, 2) for value in (kernel, stride, dilation, padding))
    columns = jax.lax.conv_general_dilated_patches(
        batched,
        kernels,
        strides,
        [(pad, pad) for pad in pads],
        rhs_dilation=dilations,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    columns = columns.reshape(*columns.shape[:2], -1)
    return columns if x.ndim == 4 else columns[0]


def fold_columns(
    x: jax.Array, output_size: Sizes, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> jax.Array:
    """[B, C k k, L] to [B, C, H, W]: the transpose of `unfold_columns`, so overlaps add up."""
    height, width = each_dim(output_size, 2)
    kernels = each_dim(kernel, 2)
    batched = x if x.ndim == 3 else x[None]
    shape = (batched.shape[0], batched.shape[1] // math.prod(kernels), height, width)

    def columns(image: jax.Array) -> jax.Array:
        return unfold_columns(image, kernel, dilation, padding, stride)

    (image,) = jax.linear_transpose(columns, jax.ShapeDtypeStruct(shape, x.dtype))(batched)
    return image if x.ndim == 3 else image[0]


POOLING: Mapping[str, Callable[..., Any]] = {
    **{f"aten.max_pool{n}d.default": _max_pool(n) for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": _max_pool_with_indices(n) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _avg_pool(n) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _adaptive_avg_pool(n) for n in (1, 2, 3)},
    **{f"aten._adaptive_avg_pool{n}d.default": _adaptive_avg_pool(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _adaptive_max_pool(n) for n in (1, 2, 3)},
    "aten.im2col.default": unfold_columns,
    "aten.col2im.default": fold_columns,
}
