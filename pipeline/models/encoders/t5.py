"""T5 in Flax NNX: the encoder alone, or with its decoder and head.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation:
dropout is not computed. Knows nothing of checkpoints. The one decision: scores are not scaled and positions are a bias
on them, made once a stack from a table of the distance between two tokens.

Leaf paths: `shared.embedding`, `{encoder,decoder}.position_bias.embedding` [buckets, N], `{encoder,decoder}.blocks.I.`
with `attention`, `attention_norm.scale`, `mlp.{wi,wo}` (gated: `mlp.{wi_0,wi_1,wo}`), `mlp_norm.scale`, in the decoder
also `cross_attention` and `cross_norm.scale`; `{encoder,decoder}.norm.scale`; `lm_head.kernel` where not tied.

Shape suffixes: B batch, T tokens, S tokens of the encoder, N heads, D hidden, V vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.attention import Attention, causal_mask, padding_mask
from pipeline.models.encoders.layers import Embedding
from pipeline.models.encoders.t5_config import T5Config
from pipeline.models.variables import tap


def position_buckets(num_tokens: int, *, num_buckets: int, max_distance: int, is_causal: bool) -> np.ndarray[Any, Any]:
    """The bucket of each distance, int [T, T] by looking and seen token.

    Half of a direction's buckets hold one distance each, the rest grow with its logarithm up to `max_distance`
    (transformers, `T5Attention._relative_position_bucket`).
    """
    places_T = np.arange(num_tokens)
    ahead_TT = places_T[None, :] - places_T[:, None]
    if is_causal:
        first_TT, distance_TT = np.zeros_like(ahead_TT), np.maximum(-ahead_TT, 0)
    else:
        num_buckets //= 2
        first_TT, distance_TT = (ahead_TT > 0) * num_buckets, np.abs(ahead_TT)
    num_exact = num_buckets // 2
    # float32 and in this order, as torch computes it: a distance at the edge of a bucket must fall on the same side.
    far_TT = np.log(np.maximum(distance_TT, 1).astype(np.float32) / np.float32(num_exact))
    far_TT = far_TT / np.float32(math.log(max_distance / num_exact)) * np.float32(num_buckets - num_exact)
    bucket_TT = np.minimum(num_exact + far_TT.astype(np.int64), num_buckets - 1)
    return first_TT + np.where(distance_TT < num_exact, distance_TT, bucket_TT)


class T5Mlp(nnx.Module):
    """Feed-forward network without biases, gated or not."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        def inner() -> nnx.Linear:
            return nnx.Linear(config.d_model, config.d_ff, use_bias=False, rngs=rngs)

        if config.is_gated:
            self.wi_0, self.wi_1 = inner(), inner()
        else:
            self.wi = inner()
        self.wo = nnx.Linear(config.d_ff, config.d_model, use_bias=False, rngs=rngs)
        self.activation = ACTIVATION_BY_NAME[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D]."""
        if hasattr(self, "wi"):
            return self.wo(self.activation(self.wi(x)))
        return self.wo(self.activation(self.wi_0(x)) * self.wi_1(x))


class T5Block(nnx.Module):
    """One layer, norms before."""

    def __init__(self, config: T5Config, *, is_decoder: bool, rngs: nnx.Rngs) -> None:
        def attention() -> Attention:
            return Attention(
                size=config.d_model, num_heads=config.num_heads, head_dim=config.d_kv, biases="", scale=1.0, rngs=rngs
            )

        self.attention, self.attention_norm = attention(), _norm(config, rngs=rngs)
        if is_decoder:
            self.cross_attention, self.cross_norm = attention(), _norm(config, rngs=rngs)
        self.mlp, self.mlp_norm = T5Mlp(config, rngs=rngs), _norm(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        seen: jax.Array | None,
        bias_1NTT: jax.Array,
        context_BSD: jax.Array | None,
        context_seen: jax.Array | None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), seen=seen, bias=bias_1NTT)
        if context_BSD is not None:
            normal_BTD = self.cross_norm(x_BTD)
            x_BTD = x_BTD + self.cross_attention(normal_BTD, context_BSD=context_BSD, seen=context_seen)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class T5Stack(nnx.Module):
    """The encoder or the decoder."""

    def __init__(self, config: T5Config, *, is_decoder: bool, rngs: nnx.Rngs) -> None:
        num_layers = config.num_decoder_layers if is_decoder else config.num_layers
        self.config, self.name = config, "decoder" if is_decoder else "encoder"
        self.position_bias = Embedding(config.relative_attention_num_buckets, config.num_heads, rngs=rngs)
        self.blocks = nnx.List([T5Block(config, is_decoder=is_decoder, rngs=rngs) for _ in range(num_layers)])
        self.norm = _norm(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        attention_mask_BT: jax.Array | None,
        context_BSD: jax.Array | None = None,
        context_mask_BS: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        is_decoder, num_tokens = self.name == "decoder", x_BTD.shape[1]
        buckets_TT = position_buckets(
            num_tokens,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
            is_causal=is_decoder,
        )
        bias_1NTT = self.position_bias(jnp.asarray(buckets_TT)).transpose(2, 0, 1)[None]
        if is_decoder:
            seen = causal_mask(num_tokens, attention_mask_BS=attention_mask_BT)
        else:
            seen = padding_mask(attention_mask_BT)
        context_seen = padding_mask(context_mask_BS)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, seen=seen, bias_1NTT=bias_1NTT, context_BSD=context_BSD, context_seen=context_seen)
            tap(f"{self.name}.blocks.{index}", x_BTD)
        return tap(f"{self.name}.norm", self.norm(x_BTD))


class T5(nnx.Module):
    """The encoder, with decoder and head where the config has them."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.shared = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder = T5Stack(config, is_decoder=False, rngs=rngs)
        if config.has_decoder:
            self.decoder = T5Stack(config, is_decoder=True, rngs=rngs)
            if not config.is_tied:
                self.lm_head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        attention_mask: jax.Array | None = None,
        decoder_input_ids: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Run the encoder, and the decoder where there is one.

        Args:
            input_ids: int32 [B, S].
            attention_mask: [B, S], ones and zeros; nothing is padding where None.
            decoder_input_ids: int32 [B, T]; needed where there is a decoder.
            decoder_attention_mask: [B, T], ones and zeros; nothing is padding where None.

        Returns:
            `last_hidden_state` [B, S, D] of the encoder alone; `logits` [B, T, V] and `encoder_last_hidden_state`.
        """
        encoded_BSD = self.encode(input_ids, attention_mask=attention_mask)
        if not self.config.has_decoder:
            return {"last_hidden_state": encoded_BSD}
        if decoder_input_ids is None:
            raise ValueError(
                "decoder_input_ids is missing: a T5 with a decoder needs the tokens before those it writes"
            )
        logits_BTV = self.decode(
            decoder_input_ids,
            encoded=encoded_BSD,
            attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
        )
        return {"logits": logits_BTV, "encoder_last_hidden_state": encoded_BSD}

    def encode(self, input_ids: jax.Array, *, attention_mask: jax.Array | None = None) -> jax.Array:
        """int32 [B, S] to [B, S, D]."""
        return self.encoder(self.shared(input_ids), attention_mask_BT=attention_mask)

    def decode(
        self,
        decoder_input_ids: jax.Array,
        *,
        encoded: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
    ) -> jax.Array:
        """int32 [B, T] to logits [B, T, V], with what `encode` gave and the mask that it had."""
        x_BTD = self.decoder(
            self.shared(decoder_input_ids),
            attention_mask_BT=decoder_attention_mask,
            context_BSD=encoded,
            context_mask_BS=attention_mask,
        )
        if self.config.scale_decoder_outputs:
            x_BTD = x_BTD * self.config.d_model**-0.5
        return self.shared.attend(x_BTD) if self.config.is_tied else self.lm_head(x_BTD)


def _norm(config: T5Config, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.d_model, epsilon=config.layer_norm_epsilon, rngs=rngs)
