"""ViT in Flax NNX: patches of an image as tokens, alone or with a classifier.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation:
dropout is not computed. Knows nothing of checkpoints. The one decision: an image has the size that the stored
positions are for; positions are never stretched to another.

Leaf paths: `embeddings.{cls_token,positions}`, `embeddings.patch.{kernel,bias}` [h, w, in, out],
`layers.I.attention.{q,k,v,o}_proj`, `layers.I.mlp.{fc1,fc2}`, `layers.I.{attention,mlp}_norm`, `norm`, `pooler`,
`classifier`.

Shape suffixes: B batch, C channels, H height, W width, T tokens (patches and one more), D hidden, L labels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.attention import Attention
from pipeline.models.encoders.layers import channels_last, convolution, layer_norm
from pipeline.models.encoders.mlp import Mlp
from pipeline.models.encoders.vit_config import VitConfig
from pipeline.models.variables import tap


class VitEmbeddings(nnx.Module):
    """Patches as tokens behind a class token, with their positions."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.cls_token = nnx.Param(jnp.zeros((1, 1, size)))
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (1, config.num_patches + 1, size)) * 0.02)
        self.patch = convolution(
            config.num_channels, size, kernel=config.patch_size, stride=config.patch_size, padding=0, rngs=rngs
        )

    def __call__(self, pixels_BCHW: jax.Array) -> jax.Array:
        """Floats [B, C, H, W] to [B, T, D]."""
        patches_BHWD = self.patch(channels_last(pixels_BCHW, into=self.patch))
        num_batch, size = patches_BHWD.shape[0], patches_BHWD.shape[-1]
        patches_BTD = patches_BHWD.reshape(num_batch, -1, size)
        first_B1D = jnp.broadcast_to(self.cls_token[...], (num_batch, 1, size))
        return jnp.concatenate([first_B1D, patches_BTD], axis=1) + self.positions[...]


class VitLayer(nnx.Module):
    """One layer, norms before."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        biases = "qkvo" if config.qkv_bias else "o"
        self.attention = Attention(size=size, num_heads=heads, head_dim=size // heads, biases=biases, rngs=rngs)
        self.attention_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.mlp = Mlp(size=size, inner=config.intermediate_size, activation=config.hidden_act, rngs=rngs)
        self.mlp_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Vit(nnx.Module):
    """The encoder, with a pooler or a classifier where the config has one."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.config = config
        self.embeddings = VitEmbeddings(config, rngs=rngs)
        self.layers = nnx.List([VitLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        if config.classifies:
            self.classifier = nnx.Linear(size, config.num_labels, rngs=rngs)
        if config.has_pooler:
            self.pooler = nnx.Linear(size, config.pooler_output_size, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> dict[str, jax.Array]:
        """Run the encoder and its head.

        Args:
            pixel_values: float [B, C, H, W] of the config's `image_size`.

        Returns:
            `logits` [B, L] of the classifier; else `last_hidden_state` [B, T, D] and `pooler_output`.

        Raises:
            ValueError: the image has another size.
        """
        if tuple(pixel_values.shape[2:]) != self.config.image_size:
            raise ValueError(
                f"pixel_values is {tuple(pixel_values.shape)}, its images must be {self.config.image_size}; resize them"
            )
        x_BTD = tap("embeddings", self.embeddings(pixel_values))
        for index, layer in enumerate(self.layers):
            x_BTD = tap(f"layers.{index}", layer(x_BTD))
        x_BTD = tap("norm", self.norm(x_BTD))
        if self.config.classifies:
            return {"logits": self.classifier(x_BTD[:, 0])}
        if not self.config.has_pooler:
            return {"last_hidden_state": x_BTD}
        pooled = tap("pooler", ACTIVATION_BY_NAME[self.config.pooler_act](self.pooler(x_BTD[:, 0])))
        return {"last_hidden_state": x_BTD, "pooler_output": pooled}
