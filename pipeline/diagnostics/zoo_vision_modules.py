"""Plain torch modules on images, volumes and waves.

Owns the convolutional part of the list of modules that people write. Knows nothing of tracing. The one decision: sizes
are odd and unequal, so a height taken for a width, or a padding on the wrong side, changes the result.

Images are [batch, channels, height, width], as torch has them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH = 3
Built = tuple[nn.Module, Mapping[str, Any]]


class OneInput(nn.Module):
    """Any module of one input, with the keyword `x`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        """What the inner module gives."""
        return self.inner(x)


def one(inner: nn.Module, *shape: int) -> Built:
    """A module of one float input."""
    return OneInput(inner), {"x": torch.randn(BATCH, *shape)}


def block(inputs: int, outputs: int, **options: Any) -> nn.Module:
    """Convolution, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, **options), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """A residual block with a projection."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = block(inputs, outputs, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The sum of both ways."""
        return functional.relu(self.second(self.first(pixels)) + self.shortcut(pixels))


class SqueezeExcite(nn.Module):
    """Channels weighed by what the whole image holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.SiLU(), nn.Conv2d(4, channels, 1), nn.Sigmoid()
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Weighed channels."""
        return pixels * self.gate(pixels)


class UNet(nn.Module):
    """Down, up, and a join of equal sizes."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.down, self.bottom = block(3, 8), block(8, 12)
        self.up: nn.Module = (
            nn.ConvTranspose2d(12, 8, 2, stride=2)
            if mode == "transposed"
            else nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(12, 8, 1))
        )
        self.join, self.head = block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of every pixel."""
        fine = self.down(pixels)
        coarse = self.bottom(functional.max_pool2d(fine, 2))
        return self.head(self.join(torch.cat([fine, self.up(coarse)], dim=1)))


class Resize(nn.Module):
    """`interpolate` in one of its modes, up and down."""

    def __init__(self, mode: str, *, align_corners: bool | None) -> None:
        super().__init__()
        self.mode, self.align_corners = mode, align_corners

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A larger and a smaller image."""
        options: dict[str, Any] = {"mode": self.mode, "align_corners": self.align_corners}
        larger = functional.interpolate(pixels, size=(13, 17), **options)
        return larger, functional.interpolate(pixels, scale_factor=0.5, **options)


class SpatialTransformer(nn.Module):
    """An affine grid that the image itself decides."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(3 * 9 * 11, 6)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The warped image."""
        grid = functional.affine_grid(
            self.affine(pixels.flatten(1)).view(-1, 2, 3), list(pixels.shape), align_corners=False
        )
        return functional.grid_sample(pixels, grid, align_corners=False)


class Waves(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(6, 12, 2, dilation=2**power) for power in range(3))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        """Filtered waves."""
        for layer in self.layers:
            gate, value = layer(functional.pad(wave, (layer.dilation[0], 0))).chunk(2, dim=1)
            wave = wave + torch.sigmoid(gate) * torch.tanh(value)
        return wave


class Capsules(nn.Module):
    """Patches to tokens by `unfold`, and back by `fold`."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Every pixel times the number of patches that hold it."""
        patches = functional.unfold(pixels, kernel_size=3, stride=2, padding=1)
        return functional.fold(patches, output_size=pixels.shape[-2:], kernel_size=3, stride=2, padding=1)


def _classifier(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def _depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, groups=12, padding=1, stride=2), nn.Hardswish(), SqueezeExcite(12)
    )


def _resize(mode: str, align_corners: bool | None) -> Callable[[], Built]:
    return lambda: (Resize(mode, align_corners=align_corners), {"pixels": torch.randn(BATCH, 3, 8, 10)})


VISION: Mapping[str, Callable[[], Built]] = {
    "lenet": lambda: one(
        nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 6, 24),
            nn.Tanh(),
            nn.Linear(24, 10),
        ),
        1,
        28,
        32,
    ),
    "cnn-batch-norm": lambda: one(_classifier(block(3, 8), nn.MaxPool2d(2), block(8, 12), width=12), 3, 15, 18),
    "resnet-block": lambda: one(_classifier(Residual(3, 8, stride=2), Residual(8, 12, stride=1), width=12), 3, 15, 18),
    "mobile-block": lambda: one(_classifier(_depthwise(), width=12), 3, 15, 18),
    "dilated-cnn": lambda: one(nn.Conv2d(4, 6, (3, 2), dilation=(2, 3), padding=(1, 2), groups=2), 4, 13, 16),
    "same-padding-cnn": lambda: one(nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), 4, 9, 11),
    "circular-padding-cnn": lambda: one(nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"), 4, 9, 11),
    "unet-transposed": lambda: one(UNet("transposed"), 3, 10, 14),
    "unet-bilinear": lambda: one(UNet("bilinear"), 3, 10, 14),
    "unet-nearest": lambda: one(UNet("nearest"), 3, 10, 14),
    "convolutional-autoencoder": lambda: one(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1, output_padding=(1, 0)),
            nn.Sigmoid(),
        ),
        3,
        16,
        19,
    ),
    "generator": lambda: one(
        nn.Sequential(
            nn.Unflatten(1, (6, 1, 1)),
            nn.ConvTranspose2d(6, 8, 4),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1, groups=1),
            nn.Tanh(),
        ),
        6,
    ),
    "discriminator": lambda: one(
        nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.InstanceNorm2d(8, affine=True), nn.Flatten()),
        3,
        10,
        14,
    ),
    "transposed-grouped": lambda: one(
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), groups=2, dilation=(1, 2)), 4, 5, 7
    ),
    "transposed-1d": lambda: one(nn.ConvTranspose1d(4, 6, 5, stride=3, padding=2, output_padding=1), 4, 9),
    "group-norm": lambda: one(nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU(), nn.InstanceNorm2d(12)), 12, 5, 7),
    "pools": lambda: one(
        nn.Sequential(
            nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
            nn.AvgPool2d(2, ceil_mode=True, padding=1),
            nn.AdaptiveMaxPool2d((2, 3)),
            nn.LPPool2d(2, 2),
        ),
        3,
        17,
        22,
    ),
    "avg-pool-uncounted": lambda: one(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), 3, 9, 12),
    "adaptive-pool-uneven": lambda: one(nn.AdaptiveAvgPool2d((4, 5)), 3, 9, 11),
    "pixel-shuffle": lambda: one(nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)), 3, 5, 7),
    "conv3d": lambda: one(
        nn.Sequential(nn.Conv3d(2, 4, (3, 2, 3), padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2)), 2, 6, 7, 8
    ),
    "transposed-3d": lambda: one(nn.ConvTranspose3d(2, 3, 3, stride=2, padding=1, output_padding=1), 2, 3, 4, 5),
    "conv1d": lambda: one(
        nn.Sequential(nn.Conv1d(6, 8, 5, stride=2), nn.BatchNorm1d(8), nn.GELU(), nn.MaxPool1d(2), nn.Conv1d(8, 4, 1)),
        6,
        40,
    ),
    "wavenet": lambda: (Waves(), {"wave": torch.randn(BATCH, 6, 20)}),
    "resize-nearest": _resize("nearest", None),
    "resize-bilinear": _resize("bilinear", False),
    "resize-bilinear-corners": _resize("bilinear", True),
    "resize-bicubic": _resize("bicubic", False),
    "resize-area": _resize("area", None),
    "spatial-transformer": lambda: (SpatialTransformer(), {"pixels": torch.randn(BATCH, 3, 9, 11)}),
    "unfold-fold": lambda: (Capsules(), {"pixels": torch.randn(BATCH, 3, 9, 11)}),
}
