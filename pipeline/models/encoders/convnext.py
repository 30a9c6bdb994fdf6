"""ConvNeXt in Flax NNX, alone or with a classifier.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation:
stochastic depth is not computed. Knows nothing of checkpoints. The one decision: everything inside is channels-last,
which makes torch's 1x1 convolutions plain products and its channels-first norms plain norms.

Leaf paths: `embeddings.{patch,norm}`, `stages.S.downsampling.{norm,convolution}` (where a stage changes size),
`stages.S.layers.L.{depthwise,norm,pointwise1,pointwise2,layer_scale}`, `norm`, `classifier`.

Shape suffixes: B batch, C channels, H height, W width, L labels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.convnext_config import INNER_NORM_EPS, ConvnextConfig
from pipeline.models.encoders.layers import channels_first, channels_last, convolution, layer_norm
from pipeline.models.variables import tap

EXPANSION = 4


class ConvnextEmbeddings(nnx.Module):
    """Patches of an image, normalised."""

    def __init__(self, config: ConvnextConfig, *, rngs: nnx.Rngs) -> None:
        size, patch = config.hidden_sizes[0], config.patch_size
        self.patch = convolution(config.num_channels, size, kernel=patch, stride=patch, padding=0, rngs=rngs)
        self.norm = layer_norm(size, eps=INNER_NORM_EPS, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, C] in and out."""
        return self.norm(self.patch(x_BHWC))


class Downsampling(nnx.Module):
    """Between stages: a norm, then a convolution that halves height and width."""

    def __init__(self, num_in: int, num_out: int, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(num_in, eps=INNER_NORM_EPS, rngs=rngs)
        self.convolution = convolution(num_in, num_out, kernel=(2, 2), stride=(2, 2), padding=0, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, C] in and out."""
        return self.convolution(self.norm(x_BHWC))


class ConvnextLayer(nnx.Module):
    """A convolution within each channel, then two products across channels, around which the input goes."""

    def __init__(self, size: int, *, config: ConvnextConfig, rngs: nnx.Rngs) -> None:
        self.depthwise = convolution(size, size, kernel=(7, 7), stride=(1, 1), padding=3, groups=size, rngs=rngs)
        self.norm = layer_norm(size, eps=INNER_NORM_EPS, rngs=rngs)
        self.pointwise1 = nnx.Linear(size, EXPANSION * size, rngs=rngs)
        self.pointwise2 = nnx.Linear(EXPANSION * size, size, rngs=rngs)
        if config.has_layer_scale:
            self.layer_scale = nnx.Param(jnp.ones((size,)))
        self.activation = ACTIVATION_BY_NAME[config.hidden_act]

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, C] in and out."""
        inner_BHWC = self.activation(self.pointwise1(self.norm(self.depthwise(x_BHWC))))
        change_BHWC = self.pointwise2(inner_BHWC)
        return x_BHWC + (change_BHWC * self.layer_scale[...] if hasattr(self, "layer_scale") else change_BHWC)


class ConvnextStage(nnx.Module):
    """Layers of one size; behind a downsampling in every stage but the first."""

    def __init__(self, index: int, *, config: ConvnextConfig, rngs: nnx.Rngs) -> None:
        sizes = config.hidden_sizes
        if index > 0:
            self.downsampling = Downsampling(sizes[index - 1], sizes[index], rngs=rngs)
        layers = [ConvnextLayer(sizes[index], config=config, rngs=rngs) for _ in range(config.depths[index])]
        self.layers = nnx.List(layers)

    def __call__(self, x_BHWC: jax.Array, *, name: str) -> jax.Array:
        """[B, H, W, C] in and out; `name` is the stage's path."""
        if hasattr(self, "downsampling"):
            x_BHWC = self.downsampling(x_BHWC)
        for index, layer in enumerate(self.layers):
            x_BHWC = tap(f"{name}.layers.{index}", layer(x_BHWC))
        return x_BHWC


class Convnext(nnx.Module):
    """The network, with a classifier where the config has one."""

    def __init__(self, config: ConvnextConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embeddings = ConvnextEmbeddings(config, rngs=rngs)
        self.stages = nnx.List([ConvnextStage(index, config=config, rngs=rngs) for index in range(len(config.depths))])
        self.norm = layer_norm(config.hidden_sizes[-1], eps=config.layer_norm_eps, rngs=rngs)
        if config.classifies:
            self.classifier = nnx.Linear(config.hidden_sizes[-1], config.num_labels, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> dict[str, jax.Array]:
        """Run the network.

        Args:
            pixel_values: float [B, C, H, W], of any size.

        Returns:
            `logits` [B, L] of the classifier; else `last_hidden_state` [B, C, H, W] and `pooler_output` [B, C].
        """
        x_BHWC = tap("embeddings", self.embeddings(channels_last(pixel_values, into=self.embeddings.patch)))
        for index, stage in enumerate(self.stages):
            x_BHWC = stage(x_BHWC, name=f"stages.{index}")
        pooled_BC = tap("norm", self.norm(x_BHWC.mean((1, 2))))
        if self.config.classifies:
            return {"logits": self.classifier(pooled_BC)}
        return {"last_hidden_state": channels_first(x_BHWC), "pooler_output": pooled_BC}
