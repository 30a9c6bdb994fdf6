"""ATen resampling of images and signals.

Owns upsampling in all of torch's modes, grid sampling and affine grids. Knows nothing of programs. The one decision: an
axis is resampled by a fixed set of taps (places and weights known from sizes alone), axis by axis, so XLA sees gathers
and sums, and the gradient comes for free.

Coordinates follow torch: `align_corners` maps ends to ends, otherwise `(i + 0.5) * scale - 0.5`; the scale is the one
the caller gave, or the ratio of the sizes. Source: ATen/native/UpSample.h.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Taps = list[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Places in the input and their weights, one pair a tap, each as long as the output."""


def _scale(size: int, wanted: int, given: float | None, *, align_corners: bool) -> float:
    if align_corners:
        return (size - 1) / (wanted - 1) if wanted > 1 else 0.0
    return 1.0 / given if given else size / wanted


def _centres(size: int, wanted: int, given: float | None, *, align_corners: bool) -> NDArray[np.float32]:
    """In single precision, as torch computes them."""
    scale = np.float32(_scale(size, wanted, given, align_corners=align_corners))
    places = np.arange(wanted, dtype=np.float32)
    return scale * places if align_corners else scale * (places + np.float32(0.5)) - np.float32(0.5)


def _nearest_taps(size: int, wanted: int, given: float | None, *, is_exact: bool) -> Taps:
    scale = np.float32(_scale(size, wanted, given, align_corners=False))
    places = np.arange(wanted, dtype=np.float32) + np.float32(0.5 if is_exact else 0.0)
    found = np.minimum(np.floor(places * scale), size - 1).astype(np.int64)
    return [(found, np.ones(wanted, np.float32))]


def _linear_taps(size: int, wanted: int, given: float | None, *, align_corners: bool) -> Taps:
    centres = np.maximum(_centres(size, wanted, given, align_corners=align_corners), 0)
    low = np.minimum(np.floor(centres).astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    share = np.clip(centres - low, 0, 1).astype(np.float32)
    return [(low, 1 - share), (high, share)]


def _cubic_taps(size: int, wanted: int, given: float | None, *, align_corners: bool) -> Taps:
    """Keys' kernel with a = -0.75; places beyond the edge are the edge's."""
    centres = _centres(size, wanted, given, align_corners=align_corners)
    low = np.floor(centres)
    share = (centres - low).astype(np.float32)
    return [
        (np.clip(low + offset, 0, size - 1).astype(np.int64), _cubic(np.abs(share - offset), -0.75))
        for offset in (-1, 0, 1, 2)
    ]


def _cubic(distance: NDArray[Any], a: float) -> NDArray[np.float32]:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0)).astype(np.float32)


def _smooth_taps(size: int, wanted: int, given: float | None, *, align_corners: bool, is_cubic: bool) -> Taps:
    """Anti-aliased: the kernel is as wide as the step of a reduction. Source: `_upsample_bilinear2d_aa` in ATen."""
    scale = _scale(size, wanted, given, align_corners=align_corners)
    stretch = max(scale, 1.0)
    support = (2.0 if is_cubic else 1.0) * stretch
    centres = scale * (np.arange(wanted) + 0.5)
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + support + 0.5).astype(np.int64), size)
    count = int((last - first).max())
    weights = np.zeros((count, wanted), np.float64)
    for tap in range(count):
        distance = np.abs((first + tap - centres + 0.5) / stretch)
        kernel = _cubic(distance, -0.5) if is_cubic else np.maximum(1 - distance, 0)
        weights[tap] = np.where(first + tap < last, kernel, 0)
    weights /= weights.sum(axis=0)
    return [(np.minimum(first + tap, size - 1), weights[tap].astype(np.float32)) for tap in range(count)]


def _resampled(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    shape = [1] * x.ndim
    shape[axis] = -1
    if len(taps) == 1:
        return jnp.take(x, jnp.asarray(taps[0][0]), axis=axis)
    parts = [
        jnp.take(x, jnp.asarray(places), axis=axis) * jnp.asarray(weights, x.dtype).reshape(shape)
        for places, weights in taps
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _upsampled(
    x: jax.Array, sizes: Sequence[int], scales: Sequence[float | None], make: Callable[..., Taps], **options: Any
) -> jax.Array:
    lead = x.ndim - len(sizes)
    for offset, (wanted, given) in enumerate(zip(sizes, scales, strict=True)):
        x = _resampled(x, lead + offset, make(x.shape[lead + offset], wanted, given, **options))
    return x


def _sizes(x: jax.Array, output_size: Any, factors: Any, num_dims: int) -> tuple[list[int], list[float | None]]:
    """From a size or factors, as the `vec` overloads take them."""
    if output_size is not None:
        return [int(size) for size in output_size], [None] * num_dims
    shape = x.shape[-num_dims:]
    return [int(size * factor) for size, factor in zip(shape, factors, strict=True)], list(factors)


def _plain(num_dims: int, make: Callable[..., Taps], **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A mode without corners: `(x, output_size, scales...)` and `(x, output_size, factors)`."""

    def default(x: jax.Array, output_size: Sequence[int], *scales: float | None) -> jax.Array:
        return _upsampled(x, output_size, (*scales, *(None,) * (num_dims - len(scales))), make, **options)

    def vec(x: jax.Array, output_size: Any, factors: Any) -> jax.Array:
        return _upsampled(x, *_sizes(x, output_size, factors, num_dims), make, **options)

    return default, vec


def _cornered(
    num_dims: int, make: Callable[..., Taps], **options: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A mode with corners: as `_plain`, with `align_corners` after the size."""

    def default(x: jax.Array, output_size: Sequence[int], align_corners: bool, *scales: float | None) -> jax.Array:
        given = (*scales, *(None,) * (num_dims - len(scales)))
        return _upsampled(x, output_size, given, make, align_corners=align_corners, **options)

    def vec(x: jax.Array, output_size: Any, align_corners: bool, factors: Any) -> jax.Array:
        return _upsampled(x, *_sizes(x, output_size, factors, num_dims), make, align_corners=align_corners, **options)

    return default, vec


def _grid_coordinate(grid: jax.Array, size: int, *, align_corners: bool) -> jax.Array:
    """From [-1, 1] to places."""
    return (grid + 1) / 2 * (size - 1) if align_corners else ((grid + 1) * size - 1) / 2


def _reflected(place: jax.Array, low: float, high: float) -> jax.Array:
    """Mirrored at both ends until it lies between them."""
    span = high - low
    if span <= 0:
        return jnp.zeros_like(place)
    beyond = jnp.abs(place - low)
    turns, rest = jnp.floor(beyond / span), jnp.mod(beyond, span)
    return jnp.where(jnp.mod(turns, 2) == 0, rest + low, span - rest + low)


def _padded_place(place: jax.Array, size: int, padding_mode: int, *, align_corners: bool) -> jax.Array:
    """Mode 0 leaves places as they are, 1 clips them to the border, 2 reflects them."""
    if padding_mode == 2:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        place = _reflected(place, low, high)
    return place if padding_mode == 0 else jnp.clip(place, 0, size - 1)


def _linear_grid_taps(place: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    low = jnp.floor(place)
    return [(low, low + 1 - place), (low + 1, place - low)]


def _nearest_grid_taps(place: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    return [(jnp.round(place), jnp.ones_like(place))]


def _cubic_grid_taps(place: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    low = jnp.floor(place)
    a = -0.75
    taps = []
    for offset in (-1, 0, 1, 2):
        d = jnp.abs(place - low - offset)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        taps.append((low + offset, jnp.where(d <= 1, near, far)))
    return taps


_GRID_TAPS = (_linear_grid_taps, _nearest_grid_taps, _cubic_grid_taps)


def _grid_sampler(num_dims: int) -> Callable[..., jax.Array]:
    def sample(
        x: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
    ) -> jax.Array:
        """X [B, C, ...] read at grid [B, ..., num_dims], whose last dim counts dims from the last backwards."""
        sizes = x.shape[2:]
        taps_by_dim = []
        for dim, size in enumerate(sizes):
            place = _grid_coordinate(grid[..., num_dims - 1 - dim], size, align_corners=align_corners)
            if interpolation_mode != 2:
                place = _padded_place(place, size, padding_mode, align_corners=align_corners)
            taps_by_dim.append(_GRID_TAPS[interpolation_mode](place))
        total = jnp.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
        for number in np.ndindex(*(len(taps) for taps in taps_by_dim)):
            weight, inside, places = jnp.ones(grid.shape[:-1], x.dtype), jnp.ones(grid.shape[:-1], jnp.bool_), []
            for dim, (tap, size) in enumerate(zip(number, sizes, strict=True)):
                place, share = taps_by_dim[dim][tap]
                if interpolation_mode == 2:
                    place = _padded_place(place, size, padding_mode, align_corners=align_corners)
                inside = inside & (place >= 0) & (place <= size - 1)
                places.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
                weight = weight * share
            read = jax.vmap(lambda image, at: image[(slice(None), *at)])(x, tuple(places))
            total = total + read * jnp.where(inside, weight, 0)[:, None]
        return total

    return sample


def grid_sampler(
    x: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """Of two or three dims."""
    return _grid_sampler(x.ndim - 2)(x, grid, interpolation_mode, padding_mode, align_corners)


def affine_grid(theta: jax.Array, size: Sequence[int], align_corners: bool) -> jax.Array:
    """Places in [-1, 1] under an affine map, theta [B, n, n + 1] to [B, ..., n]."""
    axes = []
    for length in size[2:]:
        ends = np.linspace(-1, 1, length) if length > 1 else np.zeros(1)
        axes.append(ends if align_corners else ends * (length - 1) / length)
    grid = np.stack([*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(tuple(size[2:]))], axis=-1)
    return jnp.einsum("...k,bnk->b...n", jnp.asarray(grid, theta.dtype), theta)


def _modes() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    linear = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}
    made: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        **{f"upsample_nearest{n}d": _plain(n, _nearest_taps, is_exact=False) for n in (1, 2, 3)},
        **{f"_upsample_nearest_exact{n}d": _plain(n, _nearest_taps, is_exact=True) for n in (1, 2, 3)},
        **{f"upsample_{name}": _cornered(n, _linear_taps) for n, name in linear.items()},
        "upsample_bicubic2d": _cornered(2, _cubic_taps),
        "_upsample_bilinear2d_aa": _cornered(2, _smooth_taps, is_cubic=False),
        "_upsample_bicubic2d_aa": _cornered(2, _smooth_taps, is_cubic=True),
    }
    for name, (default, vec) in made.items():
        table[f"aten.{name}.default"], table[f"aten.{name}.vec"] = default, vec
    return table


INTERPOLATION: Mapping[str, Callable[..., Any]] = {
    **_modes(),
    "aten.grid_sampler.default": grid_sampler,
    "aten.grid_sampler_2d.default": _grid_sampler(2),
    "aten.grid_sampler_3d.default": _grid_sampler(3),
    "aten.affine_grid_generator.default": affine_grid,
}
