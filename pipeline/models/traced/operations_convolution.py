"""ATen convolutions.

Owns convolutions of one to three dimensions, transposed ones included. Knows nothing of programs. The one decision:
torch's layouts are kept (channels second, weight [out, in / groups, ...]); XLA picks what its backend wants.

A transposed convolution is the gradient of a convolution: the input is dilated by the stride, the weight [in,
out / groups, ...] is flipped, and torch's padding crops the output.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.ConvTranspose2d.html
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.dtypes import promote

Sizes = int | Sequence[int]


def each_dim(value: Sizes, num_dims: int) -> tuple[int, ...]:
    """One size a dim, where one may be given for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> jax.Array:
    """Any convolution; x [B, C, ...] or without the batch."""
    num_dims = weight.ndim - 2
    x, weight = promote(x, weight)
    batched = x if x.ndim == num_dims + 2 else x[None]
    strides, dilations = each_dim(stride, num_dims), each_dim(dilation, num_dims)
    reach = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)]
    pads = [(0, 0)] * num_dims
    if isinstance(padding, str):
        if padding == "same":
            pads = [(length // 2, length - length // 2) for length in reach]
    else:
        pads = [(size, size) for size in each_dim(padding, num_dims)]
    if transposed:
        extra = each_dim(output_padding, num_dims)
        pads = [(r - low, r - high + more) for r, (low, high), more in zip(reach, pads, extra, strict=True)]
        weight = _flipped(weight, groups)
    letters = "DHW"[-num_dims:]
    y = jax.lax.conv_general_dilated(
        batched,
        weight,
        window_strides=(1,) * num_dims if transposed else strides,
        padding=pads,
        lhs_dilation=strides if transposed else None,
        rhs_dilation=dilations,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=groups,
    )
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((-1,) + (1,) * num_dims)
    return y if x.ndim == num_dims + 2 else y[0]


def _flipped(weight: jax.Array, groups: int) -> jax.Array:
    """[in, out / groups, ...] to [out, in / groups, ...], reversed in space."""
    num_in, num_out, *sizes = weight.shape
    split = weight.reshape(groups, num_in // groups, num_out, *sizes).swapaxes(1, 2)
    return jnp.flip(split.reshape(groups * num_out, num_in // groups, *sizes), tuple(range(2, weight.ndim)))


def conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> jax.Array:
    """A plain convolution."""
    return convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)


def conv_transpose(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> jax.Array:
    """A transposed convolution."""
    return convolution(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


CONVOLUTION: Mapping[str, Callable[..., Any]] = {
    "aten.convolution.default": convolution,
    **{f"aten.conv{n}d.{kind}": conv for n in (1, 2, 3) for kind in ("default", "padding")},
    "aten.conv_transpose1d.default": conv_transpose,
    "aten.conv_transpose2d.input": conv_transpose,
    "aten.conv_transpose3d.input": conv_transpose,
}
