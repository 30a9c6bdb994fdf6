"""Whisper in Flax NNX: sound to hidden states, and the decoder that writes what was said.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation:
neither dropout nor the masking of training sounds is computed. Knows nothing of checkpoints, nor of how sound becomes
features. The one decision: the encoder's sinusoidal positions are a `Buffer` read from the checkpoint, as torch stores
them, and are never computed again.

Leaf paths: `encoder.{conv1,conv2}.{kernel,bias}`, `encoder.positions`, `decoder.embed_tokens.embedding`,
`decoder.positions.embedding`, `{encoder,decoder}.layers.I.` with `attention` (keys have no bias), `attention_norm`,
`mlp.{fc1,fc2}`, `mlp_norm`, in the decoder also `cross_attention` and `cross_norm`; `{encoder,decoder}.norm`;
`proj_out.kernel` where not tied.

Shape suffixes: B batch, M mel bins, F frames, S positions of sound (F / 2), T tokens, D hidden, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.attention import Attention, causal_mask
from pipeline.models.encoders.layers import Embedding, channels_last, check_length, convolution, layer_norm
from pipeline.models.encoders.mlp import Mlp
from pipeline.models.encoders.whisper_config import LAYER_NORM_EPS, WhisperConfig
from pipeline.models.variables import Buffer, tap


class WhisperLayer(nnx.Module):
    """One layer, norms before; a decoder's also attends to the sound."""

    def __init__(self, config: WhisperConfig, *, is_decoder: bool, rngs: nnx.Rngs) -> None:
        size = config.d_model
        heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
        inner = config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim

        def attention() -> Attention:
            return Attention(size=size, num_heads=heads, head_dim=size // heads, biases="qvo", rngs=rngs)

        self.attention, self.attention_norm = attention(), _norm(size, rngs=rngs)
        if is_decoder:
            self.cross_attention, self.cross_norm = attention(), _norm(size, rngs=rngs)
        self.mlp = Mlp(size=size, inner=inner, activation=config.activation_function, rngs=rngs)
        self.mlp_norm = _norm(size, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, *, seen: jax.Array | None = None, context_BSD: jax.Array | None = None
    ) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), seen=seen)
        if context_BSD is not None:
            x_BTD = x_BTD + self.cross_attention(self.cross_norm(x_BTD), context_BSD=context_BSD)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class WhisperEncoder(nnx.Module):
    """Two convolutions over time, then layers."""

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs) -> None:
        size = config.d_model
        self.conv1 = convolution(config.num_mel_bins, size, kernel=(3,), stride=(1,), padding=1, rngs=rngs)
        self.conv2 = convolution(size, size, kernel=(3,), stride=(2,), padding=1, rngs=rngs)
        self.positions = Buffer(jnp.zeros((config.max_source_positions, size)))
        self.layers = nnx.List(
            [WhisperLayer(config, is_decoder=False, rngs=rngs) for _ in range(config.encoder_layers)]
        )
        self.norm = _norm(size, rngs=rngs)

    def __call__(self, features_BMF: jax.Array) -> jax.Array:
        """Floats [B, M, F] to [B, S, D]."""
        gelu = ACTIVATION_BY_NAME["gelu"]
        x_BSD = gelu(self.conv2(gelu(self.conv1(channels_last(features_BMF, into=self.conv1)))))
        x_BSD = x_BSD + self.positions[...]
        for index, layer in enumerate(self.layers):
            x_BSD = tap(f"encoder.layers.{index}", layer(x_BSD))
        return tap("encoder.norm", self.norm(x_BSD))


class WhisperDecoder(nnx.Module):
    """Tokens with learned positions, then layers that see the sound."""

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs) -> None:
        size = config.d_model
        self.embed_tokens = Embedding(config.vocab_size, size, rngs=rngs)
        self.positions = Embedding(config.max_target_positions, size, rngs=rngs)
        self.layers = nnx.List([WhisperLayer(config, is_decoder=True, rngs=rngs) for _ in range(config.decoder_layers)])
        self.norm = _norm(size, rngs=rngs)

    def __call__(
        self, tokens_BT: jax.Array, *, context_BSD: jax.Array, attention_mask_BT: jax.Array | None
    ) -> jax.Array:
        """int32 [B, T] to [B, T, D]."""
        num_tokens = tokens_BT.shape[1]
        check_length("decoder_input_ids", tokens_BT, longest=self.positions.num_embeddings)
        seen = causal_mask(num_tokens, attention_mask_BS=attention_mask_BT)
        x_BTD = self.embed_tokens(tokens_BT) + self.positions(jnp.arange(num_tokens))
        for index, layer in enumerate(self.layers):
            x_BTD = tap(f"decoder.layers.{index}", layer(x_BTD, seen=seen, context_BSD=context_BSD))
        return tap("decoder.norm", self.norm(x_BTD))


class Whisper(nnx.Module):
    """Encoder, decoder and head."""

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.encoder = WhisperEncoder(config, rngs=rngs)
        self.decoder = WhisperDecoder(config, rngs=rngs)
        if not config.tie_word_embeddings:
            self.proj_out = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self,
        input_features: jax.Array,
        *,
        decoder_input_ids: jax.Array,
        decoder_attention_mask: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Run encoder and decoder.

        Args:
            input_features: float [B, M, F], F = `num_frames` of the config.
            decoder_input_ids: int32 [B, T].
            decoder_attention_mask: [B, T], ones and zeros; nothing is padding where None.

        Returns:
            `logits` [B, T, V] and `encoder_last_hidden_state` [B, S, D].
        """
        encoded_BSD = self.encode(input_features)
        logits_BTV = self.decode(decoder_input_ids, encoded=encoded_BSD, decoder_attention_mask=decoder_attention_mask)
        return {"logits": logits_BTV, "encoder_last_hidden_state": encoded_BSD}

    def encode(self, input_features: jax.Array) -> jax.Array:
        """Floats [B, M, F] to [B, S, D].

        Raises:
            ValueError: the sound has another length than the positions stored in the checkpoint.
        """
        if input_features.shape[-1] != self.config.num_frames:
            raise ValueError(
                f"input_features has {input_features.shape[-1]} frames, must be {self.config.num_frames} "
                "(2 x max_source_positions); pad the features with silence"
            )
        return self.encoder(input_features)

    def decode(
        self, decoder_input_ids: jax.Array, *, encoded: jax.Array, decoder_attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """int32 [B, T] to logits [B, T, V], with what `encode` gave.

        Raises:
            ValueError: the text is longer than the stored positions.
        """
        x_BTD = self.decoder(decoder_input_ids, context_BSD=encoded, attention_mask_BT=decoder_attention_mask)
        return self.decoder.embed_tokens.attend(x_BTD) if self.config.tie_word_embeddings else self.proj_out(x_BTD)


def _norm(size: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(size, eps=LAYER_NORM_EPS, rngs=rngs)
