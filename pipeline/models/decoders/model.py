"""Decoder-only language models in Flax NNX: one forward pass for parity, export and serving.

Owns the module tree, whose leaf paths are the target of the conversion rules. Knows nothing of checkpoints, requests or
scheduling. The one decision: the pass with a key-value cache and the pass without are the same code; the cache only
changes where keys and values are read from.

Leaf paths: `embed_tokens.embedding` [V, D], `embed_positions.embedding` where positions are learned,
`layers.I.attention.{q,k,v,o}_proj.kernel` [in, out], `layers.I.attention.{q,k}_norm.scale`,
`layers.I.mlp.{gate,up,down}_proj.kernel`, or `layers.I.mlp.router.kernel` and
`layers.I.mlp.experts.{gate,up,down}_proj.kernel` [expert, in, out],
`layers.I.{input,post_attention,pre_feedforward,post_feedforward}_norm.scale`, `norm.scale`, `lm_head.kernel` [D, V]
where the head is not tied; `.bias` beside `.kernel` and `.scale` where the family has biases.

Shape suffixes: B batch, T tokens, D hidden, L attended positions, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.decoders.attention import Attention, Cache, View, make_view
from pipeline.models.decoders.config import DecoderConfig, Layer
from pipeline.models.decoders.experts import ExpertMlp
from pipeline.models.decoders.layers import Embedding, Mlp, Projection, make_norm, maker
from pipeline.models.variables import tap

__all__ = ["Cache", "Decoder", "empty_cache", "fuse_projections"]


class Block(nnx.Module):
    """One decoder layer; its norms come before attention and feed-forward, after them, or both."""

    def __init__(self, config: DecoderConfig, *, layer: Layer, rngs: nnx.Rngs, dtype: Any) -> None:
        self.is_parallel = config.is_parallel
        self.places = config.norm_places

        def norm() -> Any:
            return make_norm(config.hidden_size, config=config.norm, dtype=dtype)

        if self.places != "after":
            self.input_norm = norm()
        self.attention = Attention(config, layer=layer, rngs=rngs, dtype=dtype)
        self.post_attention_norm = norm()
        if self.places == "around":
            self.pre_feedforward_norm = norm()
        if layer.has_experts and config.experts is not None:
            self.mlp: Mlp | ExpertMlp = ExpertMlp(config, experts=config.experts, rngs=rngs, dtype=dtype)
        else:
            self.mlp = Mlp(config, rngs=rngs, dtype=dtype)
        if self.places != "before":
            self.post_feedforward_norm = norm()

    def __call__(
        self, x_BTD: jax.Array, *, view: View, cached: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """[B, T, D] to [B, T, D], and the layer's cache."""
        given_BTD = x_BTD if self.places == "after" else self.input_norm(x_BTD)
        mixed_BTD, cached = self.attention(given_BTD, view=view, cached=cached)
        if self.places == "before":
            if self.is_parallel:
                return x_BTD + mixed_BTD + self.mlp(self.post_attention_norm(x_BTD)), cached
            x_BTD = x_BTD + mixed_BTD
            return x_BTD + self.mlp(self.post_attention_norm(x_BTD)), cached
        x_BTD = x_BTD + self.post_attention_norm(mixed_BTD)
        given_BTD = x_BTD if self.places == "after" else self.pre_feedforward_norm(x_BTD)
        return x_BTD + self.post_feedforward_norm(self.mlp(given_BTD)), cached


class Decoder(nnx.Module):
    """Decoder-only language model."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.config = config

        def table(num_rows: int, scale: float) -> Embedding:
            initial = config.initializer_range
            return Embedding(num_rows, config.hidden_size, scale=scale, initial=initial, rngs=rngs, dtype=dtype)

        self.embed_tokens = table(config.vocab_size, config.embedding_scale)
        if config.learns_positions:
            self.embed_positions = table(config.max_position_embeddings, 1.0)
        self.layers = nnx.List([Block(config, layer=layer, rngs=rngs, dtype=dtype) for layer in config.layers])
        self.norm = make_norm(config.hidden_size, config=config.norm, dtype=dtype)
        if not config.tie_word_embeddings:
            made = maker(config, use_bias=False, rngs=rngs, dtype=dtype)
            self.lm_head = made(config.hidden_size, config.vocab_size)

    def __call__(self, tokens_BT: jax.Array, *, attention_mask_BT: jax.Array | None = None) -> jax.Array:
        """Causal forward pass without a cache: int32 [B, T] to float32 logits [B, T, V].

        Args:
            tokens_BT: int32. Positions count from the first column, padding included, as transformers counts them.
            attention_mask_BT: 0 where a token is padding, which nothing then sees; None where there is none.

        Raises:
            ParameterError: there are more tokens than learned positions.
        """
        length = tokens_BT.shape[1]
        if self.config.learns_positions and length > self.config.max_position_embeddings:
            raise ParameterError(
                f"{length} tokens, but the model has learned {self.config.max_position_embeddings} positions"
            )
        view = make_view(
            self.config,
            jnp.broadcast_to(jnp.arange(length), tokens_BT.shape),
            length=length,
            attention_length=length,
            is_real_BL=None if attention_mask_BT is None else attention_mask_BT != 0,
        )
        x_BTD, _ = self._hidden(tokens_BT, view=view, cache=None)
        return self._logits(x_BTD)

    def extend(
        self,
        tokens_BT: jax.Array,
        *,
        cache: Cache,
        positions_BT: jax.Array,
        attention_length: int,
        slots_B: jax.Array | None = None,
        take_B: jax.Array | None = None,
        rows_M: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """The same pass on tokens that follow what `cache` holds; prefill chunks and decode steps alike.

        Args:
            tokens_BT: int32, new tokens.
            cache: of `empty_cache`; donate it.
            positions_BT: int32, each token's place in its sequence. A padding token has a position at or beyond the
                cache's size: nothing of it is kept.
            attention_length: static; must exceed every real position.
            slots_B: int32, the cache row of each batch row; None where row b is slot b.
            take_B: int32, which of the T tokens to give logits for; the last where None.
            rows_M: int32, which rows of the batch to give logits for; all where None.

        Returns:
            float32 logits [B, V], or [M, V], and the cache with the new keys and values.
        """
        # `empty_cache` has seen to it that no frequency depends on a length that fits into the cache.
        view = make_view(self.config, positions_BT, length=1, slots_B=slots_B, attention_length=attention_length)
        x_BTD, new_cache = self._hidden(tokens_BT, view=view, cache=cache)
        if take_B is not None:
            x_BTD = jnp.take_along_axis(x_BTD, take_B[:, None, None], axis=1)
        x_BD = x_BTD[:, -1]
        return self._logits(x_BD if rows_M is None else x_BD[rows_M]), new_cache

    def _hidden(self, tokens_BT: jax.Array, *, view: View, cache: Cache | None) -> tuple[jax.Array, Cache]:
        x_BTD = tap("embed_tokens", self.embed_tokens(tokens_BT))
        if self.config.learns_positions:
            x_BTD = x_BTD + self.embed_positions(view.positions_BT)
        kept = []
        # Unrolled: XLA:CPU decodes about twice as fast as with `lax.scan` over stacked layers.
        for index, block in enumerate(self.layers):
            x_BTD, cached = block(x_BTD, view=view, cached=None if cache is None else cache[index])
            x_BTD = tap(f"layers.{index}", x_BTD)
            kept.append(cached)
        return tap("norm", self.norm(x_BTD)), tuple(kept)

    def _logits(self, x: jax.Array) -> jax.Array:
        if hasattr(self, "lm_head"):
            logits = self.lm_head.product(x)
        else:
            table_VD = self.embed_tokens.embedding[...]
            logits = jnp.einsum("...d,vd->...v", x, table_VD, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap


def empty_cache(config: DecoderConfig, *, slots: int, positions: int, dtype: Any) -> Cache:
    """Zeros: one (keys, values) pair [slots, num_key_value_heads, positions, head_dim] a layer.

    Raises:
        ParameterError: a cache of so many positions would hold keys of two rotations, or positions the model lacks.
    """
    if positions > config.longest_context:
        raise ParameterError(
            f"a cache of {positions} positions, but this {config.family} can be served with {config.longest_context}",
            hint="its rotary frequencies change with the length beyond that, and cached keys cannot follow"
            if config.longest_context < config.max_position_embeddings
            else "",
        )
    shape = (slots, config.num_key_value_heads, positions, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in config.layers)


def fuse_projections(model: Decoder, *, materialize_head: bool = False, shards: int = 1) -> Decoder:
    """Concatenate q, k, v and gate, up in place, and return the model.

    Fewer, larger products: each costs XLA:CPU a fixed dispatch and each reads its input again. The leaf paths change,
    so this is for serving alone, after loading. `materialize_head` also keeps a tied head as [D, V] of its own: it
    costs vocabulary x hidden numbers; decode of SmolLM2-135M at 8 requests goes from 60 to 48 ms a step on two cores.
    `shards` is the number of devices over which the columns will lie.
    """
    for block in model.layers:
        block.attention.fuse(shards=shards)
        block.mlp.fuse(shards=shards)
    if materialize_head and model.config.tie_word_embeddings:
        model.lm_head = Projection(jnp.array(model.embed_tokens.embedding[...].T), bias=None)
    return model
