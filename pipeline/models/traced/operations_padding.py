"""ATen padding, and moves between channels and space.

Owns what fills or refills the edges of images and sequences. Knows nothing of programs. The one decision: torch gives
widths from the last dim backwards, and a negative width cuts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.dtypes import cast

PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def constant_pad(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    """Padded from the last dim backwards; negative cuts."""
    widths = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    pairs = [(int(pad[at]), int(pad[at + 1]), 0) for at in range(0, len(pad), 2)]
    return jax.lax.pad(x, cast(0 if value is None else value, x.dtype), [*widths, *reversed(pairs)])


def pad(x: jax.Array, pad: Sequence[int], mode: str = "constant", value: Any = None) -> jax.Array:
    """Padded by a constant, by reflection, by the edge, or around."""
    return constant_pad(x, pad, value) if mode == "constant" else padded(x, pad, mode)


def padded(x: jax.Array, pad: Sequence[int], mode: str) -> jax.Array:
    """Padded with elements of the tensor itself; negative cuts."""
    kept = constant_pad(x, [min(int(width), 0) for width in pad])
    pairs = [(max(int(pad[at]), 0), max(int(pad[at + 1]), 0)) for at in range(0, len(pad), 2)]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return jnp.pad(kept, widths, mode=PAD_MODES[mode])


def _padding(mode: str) -> Callable[..., jax.Array]:
    return lambda x, pad: padded(x, pad, mode)


def pixel_shuffle(x: jax.Array, factor: int) -> jax.Array:
    """[..., C r r, H, W] to [..., C, H r, W r]."""
    *lead, channels, height, width = x.shape
    parts = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return parts.transpose(order).reshape(*lead, channels // factor**2, height * factor, width * factor)


def pixel_unshuffle(x: jax.Array, factor: int) -> jax.Array:
    """[..., C, H r, W r] to [..., C r r, H, W]."""
    *lead, channels, height, width = x.shape
    parts = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    n = len(lead)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return parts.transpose(order).reshape(*lead, channels * factor**2, height // factor, width // factor)


def channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    """Channels of the groups dealt out in turn."""
    batch, channels, *rest = x.shape
    return x.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(x.shape)


PADDING: Mapping[str, Callable[..., Any]] = {
    "aten.constant_pad_nd.default": constant_pad,
    "aten.pad.default": pad,
    **{f"aten.reflection_pad{n}d.default": _padding("reflect") for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": _padding("replicate") for n in (1, 2, 3)},
    "aten._pad_circular.default": _padding("circular"),
    "aten.pixel_shuffle.default": pixel_shuffle,
    "aten.pixel_unshuffle.default": pixel_unshuffle,
    "aten.channel_shuffle.default": channel_shuffle,
    "aten.native_channel_shuffle.default": channel_shuffle,
}
