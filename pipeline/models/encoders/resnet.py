"""ResNet in Flax NNX, alone or with a classifier.

Owns the module tree, whose leaf paths are the target of the conversion rules. Knows nothing of checkpoints. The one
decision: images are channels-last inside and turned at both doors, so callers give and get torch's order.

`train()` makes the batch norms use and record the statistics of the batch; `eval()`, the state a model is loaded in,
uses the recorded ones.

Leaf paths: `embedder.{convolution.kernel,normalization.*}`, `stages.S.layers.L.layer.I.{convolution,normalization}`,
`stages.S.layers.L.shortcut.{convolution,normalization}`, `classifier`; a normalization has `scale`, `bias`, `mean`,
`var`.

Shape suffixes: B batch, C channels, H height, W width, L labels.
"""

import jax
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.layers import BatchNorm, channels_first, channels_last, convolution
from pipeline.models.encoders.resnet_config import (
    BATCH_NORM_EPS,
    BOTTLENECK_REDUCTION,
    TORCH_MOMENTUM,
    ResnetConfig,
)
from pipeline.models.variables import tap


class ConvolutionLayer(nnx.Module):
    """A convolution without bias, a batch norm, and an activation where there is one."""

    def __init__(
        self, num_in: int, num_out: int, *, kernel: int, stride: int, activation: str | None, rngs: nnx.Rngs
    ) -> None:
        self.convolution = convolution(
            num_in,
            num_out,
            kernel=(kernel, kernel),
            stride=(stride, stride),
            padding=kernel // 2,
            use_bias=False,
            rngs=rngs,
        )
        self.normalization = BatchNorm(num_out, eps=BATCH_NORM_EPS, torch_momentum=TORCH_MOMENTUM)
        self.activation = None if activation is None else ACTIVATION_BY_NAME[activation]

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, C] in and out."""
        x_BHWC = self.normalization(self.convolution(x_BHWC))
        return x_BHWC if self.activation is None else self.activation(x_BHWC)


class ResnetLayer(nnx.Module):
    """Convolutions around which the input goes; through a shortcut where it changes size.

    Inside a layer the activation is ReLU whatever the config says, as in transformers; the config's is the last.
    """

    def __init__(self, num_in: int, num_out: int, *, stride: int, config: ResnetConfig, rngs: nnx.Rngs) -> None:
        def conv(a: int, b: int, *, kernel: int, stride: int = 1, activation: str | None = "relu") -> ConvolutionLayer:
            return ConvolutionLayer(a, b, kernel=kernel, stride=stride, activation=activation, rngs=rngs)

        if config.is_bottleneck:
            narrow = num_out // BOTTLENECK_REDUCTION
            early = config.downsample_in_bottleneck
            parts = [
                conv(num_in, narrow, kernel=1, stride=stride if early else 1),
                conv(narrow, narrow, kernel=3, stride=1 if early else stride),
                conv(narrow, num_out, kernel=1, activation=None),
            ]
        else:
            parts = [
                conv(num_in, num_out, kernel=3, stride=stride),
                conv(num_out, num_out, kernel=3, activation=None),
            ]
        self.layer = nnx.List(parts)
        if num_in != num_out or stride != 1:
            self.shortcut = conv(num_in, num_out, kernel=1, stride=stride, activation=None)
        self.activation = ACTIVATION_BY_NAME[config.hidden_act]

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, C] in and out."""
        around_BHWC = self.shortcut(x_BHWC) if hasattr(self, "shortcut") else x_BHWC
        for part in self.layer:
            x_BHWC = part(x_BHWC)
        return self.activation(x_BHWC + around_BHWC)


class ResnetStage(nnx.Module):
    """Layers of one size; the first changes it."""

    def __init__(
        self, num_in: int, num_out: int, *, stride: int, depth: int, config: ResnetConfig, rngs: nnx.Rngs
    ) -> None:
        self.layers = nnx.List(
            [
                ResnetLayer(
                    num_out if index else num_in, num_out, stride=1 if index else stride, config=config, rngs=rngs
                )
                for index in range(depth)
            ]
        )

    def __call__(self, x_BHWC: jax.Array, *, name: str) -> jax.Array:
        """[B, H, W, C] in and out; `name` is the stage's path."""
        for index, layer in enumerate(self.layers):
            x_BHWC = tap(f"{name}.layers.{index}", layer(x_BHWC))
        return x_BHWC


class Resnet(nnx.Module):
    """The network, with a classifier where the config has one."""

    def __init__(self, config: ResnetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedder = ConvolutionLayer(
            config.num_channels, config.embedding_size, kernel=7, stride=2, activation=config.hidden_act, rngs=rngs
        )
        sizes = (config.embedding_size, *config.hidden_sizes)
        strides = [2 if index or config.downsample_in_first_stage else 1 for index in range(len(config.depths))]
        self.stages = nnx.List(
            [
                ResnetStage(num_in, num_out, stride=stride, depth=depth, config=config, rngs=rngs)
                for num_in, num_out, stride, depth in zip(sizes, sizes[1:], strides, config.depths, strict=False)
            ]
        )
        if config.classifies:
            self.classifier = nnx.Linear(sizes[-1], config.num_labels, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> dict[str, jax.Array]:
        """Run the network.

        Args:
            pixel_values: float [B, C, H, W], of any size.

        Returns:
            `logits` [B, L] of the classifier; else `last_hidden_state` [B, C, H, W] and `pooler_output` [B, C, 1, 1].
        """
        x_BHWC = tap("embedder", self.embedder(channels_last(pixel_values, into=self.embedder.convolution)))
        x_BHWC = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for index, stage in enumerate(self.stages):
            x_BHWC = stage(x_BHWC, name=f"stages.{index}")
        pooled_BC = x_BHWC.mean((1, 2))
        if self.config.classifies:
            return {"logits": self.classifier(pooled_BC)}
        return {"last_hidden_state": channels_first(x_BHWC), "pooler_output": pooled_BC[:, :, None, None]}
