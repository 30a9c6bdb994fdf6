"""CLIP in Flax NNX: texts and images into one space.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation.
Knows nothing of checkpoints. The one decision: the two towers are offered one by one (`embed_texts`, `embed_images`),
because those who search embed each once.

Leaf paths: `text.{token,position}.embedding`, `text.norm`, `vision.{cls_token,patch.kernel,position.embedding}`,
`vision.{pre_norm,post_norm}`, `{text,vision}.layers.I.attention.{q,k,v,o}_proj`, `....mlp.{fc1,fc2}`,
`....{attention,mlp}_norm`, `{text,visual}_projection.kernel`, `logit_scale`.

Shape suffixes: B texts, I images, C channels, H height, W width, T tokens, D hidden, E projection_dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.encoders.attention import Attention, causal_mask
from pipeline.models.encoders.clip_config import ClipConfig, ClipText, ClipTower, ClipVision
from pipeline.models.encoders.layers import Embedding, channels_last, check_length, convolution, layer_norm
from pipeline.models.encoders.mlp import Mlp
from pipeline.models.variables import tap


class ClipLayer(nnx.Module):
    """One layer, norms before."""

    def __init__(self, config: ClipTower, *, rngs: nnx.Rngs) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        self.attention = Attention(size=size, num_heads=heads, head_dim=size // heads, biases="qkvo", rngs=rngs)
        self.attention_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.mlp = Mlp(size=size, inner=config.intermediate_size, activation=config.hidden_act, rngs=rngs)
        self.mlp_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, seen: jax.Array | None) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), seen=seen)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class ClipTextEncoder(nnx.Module):
    """Causal encoder of texts, pooled at the end-of-text token."""

    def __init__(self, config: ClipText, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.config = config
        self.token = Embedding(config.vocab_size, size, rngs=rngs)
        self.position = Embedding(config.max_position_embeddings, size, rngs=rngs)
        self.layers = nnx.List([ClipLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, *, attention_mask_BT: jax.Array | None) -> jax.Array:
        """int32 [B, T] to [B, D]."""
        num_tokens = tokens_BT.shape[1]
        check_length("input_ids", tokens_BT, longest=self.config.max_position_embeddings)
        seen = causal_mask(num_tokens, attention_mask_BS=attention_mask_BT)
        x_BTD = self.token(tokens_BT) + self.position(jnp.arange(num_tokens))
        for index, layer in enumerate(self.layers):
            x_BTD = tap(f"text.layers.{index}", layer(x_BTD, seen=seen))
        x_BTD = tap("text.norm", self.norm(x_BTD))
        if self.config.pools_largest_token:
            end_B = jnp.argmax(tokens_BT, axis=1)
        else:
            end_B = jnp.argmax(tokens_BT == self.config.eos_token_id, axis=1)  # the first, for it may also pad
        return jnp.take_along_axis(x_BTD, end_B[:, None, None], axis=1)[:, 0]


class ClipVisionEncoder(nnx.Module):
    """Encoder of patches, pooled at the class token."""

    def __init__(self, config: ClipVision, *, rngs: nnx.Rngs) -> None:
        size, patch = config.hidden_size, (config.patch_size, config.patch_size)
        self.config = config
        self.cls_token = nnx.Param(jax.random.normal(rngs.params(), (size,)) * size**-0.5)
        self.patch = convolution(
            config.num_channels, size, kernel=patch, stride=patch, padding=0, use_bias=False, rngs=rngs
        )
        self.position = Embedding(config.num_positions, size, rngs=rngs)
        self.pre_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.layers = nnx.List([ClipLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.post_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, pixels_ICHW: jax.Array) -> jax.Array:
        """Floats [I, C, H, W] to [I, D]."""
        if tuple(pixels_ICHW.shape[2:]) != (self.config.image_size, self.config.image_size):
            size = self.config.image_size
            raise ValueError(f"pixel_values is {tuple(pixels_ICHW.shape)}, its images must be {size} by {size}")
        patches_IHWD = self.patch(channels_last(pixels_ICHW, into=self.patch))
        num_images, size = patches_IHWD.shape[0], patches_IHWD.shape[-1]
        first_I1D = jnp.broadcast_to(self.cls_token[...], (num_images, 1, size))
        x_ITD = jnp.concatenate([first_I1D, patches_IHWD.reshape(num_images, -1, size)], axis=1)
        x_ITD = tap("vision.pre_norm", self.pre_norm(x_ITD + self.position.embedding[...]))
        for index, layer in enumerate(self.layers):
            x_ITD = tap(f"vision.layers.{index}", layer(x_ITD, seen=None))
        return tap("vision.post_norm", self.post_norm(x_ITD[:, 0]))


class Clip(nnx.Module):
    """Both towers and the space they share."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.text = ClipTextEncoder(config.text, rngs=rngs)
        self.vision = ClipVisionEncoder(config.vision, rngs=rngs)
        self.text_projection = nnx.Linear(config.text.hidden_size, config.projection_dim, use_bias=False, rngs=rngs)
        self.visual_projection = nnx.Linear(config.vision.hidden_size, config.projection_dim, use_bias=False, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.zeros(()))

    def __call__(
        self, input_ids: jax.Array, *, pixel_values: jax.Array, attention_mask: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Embed texts and images, and compare each with each.

        Args:
            input_ids: int32 [B, T], each text with its end-of-text token.
            pixel_values: float [I, C, H, W].
            attention_mask: [B, T], ones and zeros; nothing is padding where None.

        Returns:
            `text_embeds` [B, E] and `image_embeds` [I, E] of length one; `logits_per_text` [B, I] and
            `logits_per_image` [I, B], their cosines times `exp(logit_scale)`.
        """
        image_IE = _unit(self.embed_images(pixel_values))
        text_BE = _unit(self.embed_texts(input_ids, attention_mask=attention_mask))
        logits_BI = text_BE @ image_IE.T * jnp.exp(self.logit_scale[...])
        return {
            "logits_per_image": logits_BI.T,
            "logits_per_text": logits_BI,
            "text_embeds": text_BE,
            "image_embeds": image_IE,
        }

    def embed_texts(self, input_ids: jax.Array, *, attention_mask: jax.Array | None = None) -> jax.Array:
        """int32 [B, T] to [B, E], of any length.

        Raises:
            ValueError: the texts are longer than the stored positions.
        """
        return self.text_projection(self.text(input_ids, attention_mask_BT=attention_mask))

    def embed_images(self, pixel_values: jax.Array) -> jax.Array:
        """Floats [I, C, H, W] to [I, E], of any length.

        Raises:
            ValueError: the images have another size than the stored positions are for.
        """
        return self.visual_projection(self.vision(pixel_values))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
