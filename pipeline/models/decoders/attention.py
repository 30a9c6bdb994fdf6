"""Grouped-query attention of a decoder, with or without a key-value cache.

Owns projections, rotation, masks and the reading and writing of the cache. Knows nothing of blocks or requests. The one
decision: windows and padding are masks over one cache of one shape, so every layer of every family is compiled and
scheduled alike.

Shape suffixes: B batch, T tokens, D hidden, N query heads, K key-value heads, G query heads per key-value head,
H head_dim, Q = G * T, L attended positions, P cached positions, S slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.decoders.config import DecoderConfig, Layer
from pipeline.models.decoders.layers import apart, make_norm, maker
from pipeline.models.decoders.rotary import rotate, rotation
from pipeline.models.decoders.rotary_scaling import Rotary

MASKED_SCORE = -1e30
"""Finite, so that a row without any visible key yields finite numbers instead of NaN."""

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values of each layer, [S, K, P, H]. This order is the fast one: XLA:CPU attends over 256 positions in
0.12 ms a layer, 0.38 ms with [S, P, K, H], 0.42 ms through `jax.nn.dot_product_attention`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What attention may see in one pass; made once and shared by the layers.

    `slots_B` None means that row b of the batch is slot b, which spares a gather.
    """

    turns: Mapping[Rotary, tuple[jax.Array, jax.Array]]
    """Cosines and sines by rotation; layers of one model may turn differently."""
    positions_BT: jax.Array
    slots_B: jax.Array | None
    attention_length: int
    is_real_BL: jax.Array | None = None
    """False where a key is padding; None where there is none."""


def make_view(
    config: DecoderConfig,
    positions_BT: jax.Array,
    *,
    length: int,
    attention_length: int,
    slots_B: jax.Array | None = None,
    is_real_BL: jax.Array | None = None,
) -> View:
    """The view of a pass; `length` is that of its longest sequence (see `Rotary.frequencies`)."""
    # In the order of the layers: a set's order differs between processes, and a compilation cache would miss.
    kinds = dict.fromkeys(layer.rotary for layer in config.layers if layer.rotary is not None)
    return View(
        turns={
            kind: rotation(
                positions_BT,
                frequencies_F=kind.frequencies(length=length),
                attention_factor=kind.attention_factor,
            )
            for kind in kinds
        },
        positions_BT=positions_BT,
        slots_B=slots_B,
        attention_length=attention_length,
        is_real_BL=is_real_BL,
    )


OverCache = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""What `attend_over_copy` is, or stands in its place."""


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, config: DecoderConfig, *, layer: Layer, rngs: nnx.Rngs, dtype: Any) -> None:
        self.layer = layer
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        self.softcap = config.attention_softcap
        self.rotates_in_float32 = config.rotates_in_float32
        self.over_cache: OverCache = attend_over_copy
        wide, narrow = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        made = maker(config, use_bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.q_proj = made(config.hidden_size, wide)
        self.k_proj = made(config.hidden_size, narrow)
        self.v_proj = made(config.hidden_size, narrow)
        self.o_proj = maker(config, use_bias=config.output_bias, rngs=rngs, dtype=dtype)(wide, config.hidden_size)
        if config.qk_norm != "none":
            sizes = (self.head_dim, self.head_dim) if config.qk_norm == "head" else (wide, narrow)
            self.q_norm, self.k_norm = (make_norm(size, config=config.norm, dtype=dtype) for size in sizes)

    def fuse(self, *, shards: int = 1) -> None:
        """Replace the three input projections by `qkv_proj`."""
        self.shards = shards
        self.qkv_proj = self.q_proj.concatenated([self.q_proj, self.k_proj, self.v_proj], shards=shards)
        del self.q_proj, self.k_proj, self.v_proj

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        wide, narrow = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        if hasattr(self, "qkv_proj"):
            q, k, v = apart(self.qkv_proj(x_BTD), [wide, narrow, narrow], shards=self.shards)
        else:
            q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def __call__(
        self, x_BTD: jax.Array, *, view: View, cached: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """[B, T, D] to [B, T, D], and this layer's cache with the new keys and values in it."""
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD)
        of_layer: dict[str, Any] = {"layer": self.layer, "view": view, "softcap": self.softcap}
        if cached is not None:
            mixed_BTD, keys, values = self.over_cache(
                q_BTNH, k_BTKH, v_BTKH, *cached, **of_layer, in_float32=self.rotates_in_float32
            )
            return self.o_proj(mixed_BTD), (keys, values)
        q_BTNH, k_BTKH = _rotated(q_BTNH, k_BTKH, layer=self.layer, view=view, in_float32=self.rotates_in_float32)
        return self.o_proj(_attend(q_BTNH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), **of_layer)), None


def attend_over_copy(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    keys_SKPH: jax.Array,
    values_SKPH: jax.Array,
    *,
    layer: Layer,
    view: View,
    softcap: float | None,
    in_float32: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotate and write new keys and values, and attend: [B, T, N * H], and the cache as it is afterwards.

    The attended positions of the batch's slots are copied first.
    """
    q_BTNH, k_BTKH = _rotated(q_BTNH, k_BTKH, layer=layer, view=view, in_float32=in_float32)
    keys_SKPH, values_SKPH = _written(keys_SKPH, k_BTKH, view=view), _written(values_SKPH, v_BTKH, view=view)
    keys_BKLH, values_BKLH = _visible(keys_SKPH, view=view), _visible(values_SKPH, view=view)
    return _attend(q_BTNH, keys_BKLH, values_BKLH, layer=layer, view=view, softcap=softcap), keys_SKPH, values_SKPH


def _rotated(
    q_BTNH: jax.Array, k_BTKH: jax.Array, *, layer: Layer, view: View, in_float32: bool
) -> tuple[jax.Array, jax.Array]:
    if layer.rotary is None:
        return q_BTNH, k_BTKH
    cos, sin = view.turns[layer.rotary]
    q_BTNH, k_BTKH = (rotate(x, cos=cos, sin=sin, in_float32=in_float32) for x in (q_BTNH, k_BTKH))
    return q_BTNH, k_BTKH


def _written(cache_SKPH: jax.Array, new_BTKH: jax.Array, *, view: View) -> jax.Array:
    slots_B = jnp.arange(new_BTKH.shape[0]) if view.slots_B is None else view.slots_B
    return cache_SKPH.at[slots_B[:, None], :, view.positions_BT].set(new_BTKH.astype(cache_SKPH.dtype), mode="drop")


def _visible(cache_SKPH: jax.Array, *, view: View) -> jax.Array:
    head_SKLH = cache_SKPH[:, :, : view.attention_length]
    return head_SKLH if view.slots_B is None else jnp.take(head_SKLH, view.slots_B, axis=0, mode="clip")


def _seen(layer: Layer, *, view: View, num_keys: int) -> jax.Array:
    """Whether a token at position p sees a key: keys 0..p, of these the last `window`, and none that is padding."""
    keys_L = jnp.arange(num_keys)
    seen_BTL = keys_L <= view.positions_BT[..., None]
    if layer.window is not None:
        seen_BTL &= keys_L > view.positions_BT[..., None] - layer.window
    return seen_BTL if view.is_real_BL is None else seen_BTL & view.is_real_BL[:, None, :]


def _attend(
    q_BTNH: jax.Array,
    keys_BKLH: jax.Array,
    values_BKLH: jax.Array,
    *,
    layer: Layer,
    view: View,
    softcap: float | None,
) -> jax.Array:
    """Softmax attention over the keys that are seen. Returns [B, T, N * H]."""
    seen_BTL = _seen(layer, view=view, num_keys=keys_BKLH.shape[2])
    num_batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    num_groups = keys_BKLH.shape[1]
    per_group = num_heads // num_groups
    q_BKGTH = q_BTNH.reshape(num_batch, num_tokens, num_groups, per_group, head_dim).transpose(0, 2, 3, 1, 4)
    q_BKQH = q_BKGTH.reshape(num_batch, num_groups, per_group * num_tokens, head_dim)
    scores_BKQL = jnp.einsum("bkqh,bklh->bkql", q_BKQH, keys_BKLH, preferred_element_type=jnp.float32) * layer.scale
    if softcap is not None:
        scores_BKQL = jnp.tanh(scores_BKQL / softcap) * softcap
    seen_BQL = jnp.tile(seen_BTL, (1, per_group, 1))
    weights_BKQL = jax.nn.softmax(jnp.where(seen_BQL[:, None], scores_BKQL, MASKED_SCORE), axis=-1)
    mixed_BKQH = jnp.einsum("bkql,bklh->bkqh", weights_BKQL.astype(values_BKLH.dtype), values_BKLH)
    mixed_BKGTH = mixed_BKQH.reshape(num_batch, num_groups, per_group, num_tokens, head_dim)
    return mixed_BKGTH.transpose(0, 3, 1, 2, 4).reshape(num_batch, num_tokens, num_heads * head_dim)
