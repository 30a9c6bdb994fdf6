"""Projections, norms, embeddings and the feed-forward network of a decoder.

Owns the small modules and their leaf names. Knows nothing of attention or caches. The one decision: kernels are
[in, out], because on XLA:CPU this order reads weights faster than [out, in].

Shape suffixes: B batch, T tokens, D hidden, M mlp.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.models.decoders.config import Activation, DecoderConfig
from pipeline.models.decoders.config import Norm as NormConfig

ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Projection(nnx.Module):
    """`x @ kernel + bias`, kernel [in, out]."""

    def __init__(self, kernel: jax.Array, *, bias: jax.Array | None) -> None:
        self.kernel = nnx.Param(kernel)
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def initialized(
        cls, num_in: int, num_out: int, *, use_bias: bool, scale: float, rngs: nnx.Rngs, dtype: Any
    ) -> "Projection":
        """Normal kernel of standard deviation `scale`, zero bias."""
        kernel = jax.random.normal(rngs.params(), (num_in, num_out), dtype) * jnp.asarray(scale, dtype)
        return cls(kernel, bias=jnp.zeros((num_out,), dtype) if use_bias else None)

    @classmethod
    def concatenated(cls, parts: "list[Projection]", *, shards: int = 1) -> "Projection":
        """One projection whose output, read with `apart`, is the parts' outputs.

        With several `shards` its columns are those of the first shard of each part, then those of the second, so that a
        device which holds one stretch of the columns holds its own share of every part.
        """
        biases = [part.bias[...] for part in parts if part.bias is not None]
        kernel = side_by_side([part.kernel[...] for part in parts], shards=shards)
        return cls(kernel, bias=side_by_side(biases, shards=shards) if biases else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., out], in the dtype of `x`."""
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]

    def product(self, x: jax.Array) -> jax.Array:
        """Without the bias: [..., in] to float32 [..., out]."""
        return jnp.matmul(x, self.kernel[...], preferred_element_type=jnp.float32)


def side_by_side(parts: Sequence[jax.Array], *, shards: int) -> jax.Array:
    """The parts along their last axis, shard by shard where there are several."""
    if shards == 1:
        return jnp.concatenate(parts, axis=-1)
    lead = parts[0].shape[:-1]
    return jnp.concatenate([part.reshape(*lead, shards, -1) for part in parts], axis=-1).reshape(*lead, -1)


def apart(y: jax.Array, sizes: Sequence[int], *, shards: int) -> list[jax.Array]:
    """The outputs, of `sizes`, of the projections that `Projection.concatenated` made one."""
    if shards == 1:
        return jnp.split(y, np.cumsum(sizes)[:-1], axis=-1)
    lead = y.shape[:-1]
    own = jnp.split(y.reshape(*lead, shards, -1), np.cumsum(sizes)[:-1] // shards, axis=-1)
    return [part.reshape(*lead, size) for part, size in zip(own, sizes, strict=True)]


class RmsNorm(nnx.Module):
    """Root mean square norm; statistics in float32."""

    def __init__(self, size: int, *, config: NormConfig, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.full((size,), 1.0 - config.offset, dtype))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Keeps shape and dtype."""
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.eps)
        scale = self.scale[...]
        if not self.config.scales_in_float32:
            return scale * normal.astype(x.dtype)
        # The stored scale is never changed: one plus a bfloat16 near zero would lose its last bits for good.
        return (normal * (scale.astype(jnp.float32) + self.config.offset)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm by mean and variance, in float32, as torch computes it."""

    def __init__(self, size: int, *, config: NormConfig, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Keeps shape and dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.config.eps)
        return (normal * self.scale[...] + self.bias[...]).astype(x.dtype)


def make_norm(size: int, *, config: NormConfig, dtype: Any) -> RmsNorm | LayerNorm:
    """The norm that the config names."""
    kind = RmsNorm if config.kind == "rms" else LayerNorm
    return kind(size, config=config, dtype=dtype)


class Embedding(nnx.Module):
    """A table of rows; the tokens' is also the output head where the config ties them."""

    def __init__(self, num_rows: int, size: int, *, scale: float, initial: float, rngs: nnx.Rngs, dtype: Any) -> None:
        table = jax.random.normal(rngs.params(), (num_rows, size), dtype) * jnp.asarray(initial, dtype)
        self.embedding = nnx.Param(table)
        self.scale = scale

    def __call__(self, rows_BT: jax.Array) -> jax.Array:
        """int32 [B, T] to [B, T, D], times the scale rounded to the table's dtype: 55.5 for 55.4256 in bfloat16."""
        x_BTD = jnp.take(self.embedding[...], rows_BT, axis=0, mode="clip")
        return x_BTD if self.scale == 1.0 else x_BTD * jnp.asarray(self.scale, x_BTD.dtype)


class Mlp(nnx.Module):
    """Feed-forward network, gated or not."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: Any) -> None:
        made = maker(config, use_bias=config.mlp_bias, rngs=rngs, dtype=dtype)
        self.activation = config.activation
        if config.is_gated:
            self.gate_proj = made(config.hidden_size, config.intermediate_size)
        self.up_proj = made(config.hidden_size, config.intermediate_size)
        self.down_proj = made(config.intermediate_size, config.hidden_size)

    def fuse(self, *, shards: int = 1) -> None:
        """Replace gate and up by `gate_up_proj`."""
        if hasattr(self, "gate_proj"):
            self.shards = shards
            self.gate_up_proj = self.gate_proj.concatenated([self.gate_proj, self.up_proj], shards=shards)
            del self.gate_proj, self.up_proj

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        act = ACTIVATIONS[self.activation]
        if hasattr(self, "gate_up_proj"):
            both = self.gate_up_proj(x_BTD)
            gate_BTM, up_BTM = apart(both, [both.shape[-1] // 2] * 2, shards=self.shards)
            return self.down_proj(act(gate_BTM) * up_BTM)
        if hasattr(self, "gate_proj"):
            return self.down_proj(act(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return self.down_proj(act(self.up_proj(x_BTD)))


def maker(config: DecoderConfig, *, use_bias: bool, rngs: nnx.Rngs, dtype: Any) -> Callable[[int, int], Projection]:
    """Makes projections of one config: `made(num_in, num_out)`."""

    def made(num_in: int, num_out: int) -> Projection:
        return Projection.initialized(
            num_in, num_out, use_bias=use_bias, scale=config.initializer_range, rngs=rngs, dtype=dtype
        )

    return made
