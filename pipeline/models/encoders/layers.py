"""Flax layers with torch's conventions.

Owns how a Flax layer is made so that it computes what torch's does. Knows no model. The one decision: Flax's own layers
are used wherever they can be told to agree, with every constant given; their defaults differ from torch's.

Shape suffixes: B batch, H height, W width, C channels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Embedding(nnx.Embed):
    """A table of vectors, given in the dtype it is stored in and not, as by Flax, in that of its initialization."""

    def __init__(self, num: int, size: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(num, size, rngs=rngs)
        self.dtype = None


def layer_norm(size: int, *, eps: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Torch's `LayerNorm`.

    Flax's fast variance, `E[x**2] - E[x]**2`, loses the variance of values far from zero to rounding.
    """
    return nnx.LayerNorm(size, epsilon=eps, use_fast_variance=False, rngs=rngs)


def convolution(
    num_in: int,
    num_out: int,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: int,
    rngs: nnx.Rngs,
    use_bias: bool = True,
    groups: int = 1,
) -> nnx.Conv:
    """Torch's `Conv1d` or `Conv2d` on channels-last arrays; `padding` is the same at every border."""
    return nnx.Conv(
        num_in,
        num_out,
        tuple(kernel),
        strides=tuple(stride),
        padding=[(padding, padding)] * len(kernel),
        feature_group_count=groups,
        use_bias=use_bias,
        rngs=rngs,
    )


class BatchNorm(nnx.Module):
    """torch's `BatchNorm2d` over the last axis.

    In training mode it normalises by the batch and moves the running statistics: `running = m * running + (1 - m) *
    batch`, where Flax's `m` is one minus torch's momentum, and the running variance takes the unbiased variance of the
    batch while the batch itself is normalised by the biased one (torch, `nn.BatchNorm2d`). Flax's own layer keeps the
    biased one in both places. `train()` and `eval()` of the model switch between the modes; it begins in evaluation.
    """

    def __init__(self, size: int, *, eps: float, torch_momentum: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))
        self.mean = nnx.BatchStat(jnp.zeros((size,)))
        self.var = nnx.BatchStat(jnp.ones((size,)))
        self.eps, self.momentum = eps, 1.0 - torch_momentum
        self.use_running_average = True

    def set_view(self, *, use_running_average: bool) -> None:
        """For `nnx.view`: the same numbers in another mode."""
        self.use_running_average = use_running_average

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Keeps shape and dtype; statistics in float32."""
        if self.use_running_average:
            mean_C, var_C = self.mean[...].astype(jnp.float32), self.var[...].astype(jnp.float32)
        else:
            mean_C, var_C = self._observe(x_BHWC)
        gain_C = jax.lax.rsqrt(var_C + self.eps) * self.scale[...]
        return ((x_BHWC.astype(jnp.float32) - mean_C) * gain_C + self.bias[...]).astype(x_BHWC.dtype)

    def _observe(self, x_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes, wide = tuple(range(x_BHWC.ndim - 1)), x_BHWC.astype(jnp.float32)
        mean_C, var_C = wide.mean(axes), wide.var(axes)
        num = x_BHWC.size // x_BHWC.shape[-1]
        for running, seen_C in ((self.mean, mean_C), (self.var, var_C * (num / max(num - 1, 1)))):
            moved_C = self.momentum * running[...] + (1.0 - self.momentum) * jax.lax.stop_gradient(seen_C)
            running[...] = moved_C.astype(running[...].dtype)
        return mean_C, var_C


def channels_last(pixels: Any, *, into: nnx.Conv) -> jax.Array:
    """[B, C, ...] of torch to [B, ..., C], in the dtype in which the convolution that takes it computes."""
    return jnp.moveaxis(jnp.asarray(pixels, into.kernel.dtype), 1, -1)


def channels_first(x: jax.Array) -> jax.Array:
    """[B, ..., C] to [B, C, ...] of torch."""
    return jnp.moveaxis(x, -1, 1)


def check_length(name: str, tokens_BT: Any, *, longest: int) -> None:
    """Refuse texts that have no position; looked up beyond its end, a table gives not-a-number and no error.

    Raises:
        ValueError: `tokens_BT` is longer than `longest`.
    """
    if tokens_BT.shape[1] > longest:
        raise ValueError(
            f"{name} has {tokens_BT.shape[1]} tokens, the model has positions for {longest}; truncate the texts"
        )
