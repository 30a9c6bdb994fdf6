"""A small convolutional network for 8 x 8 grey images, in plain torch.

This is what a user of `train.fsdp` writes: a factory, a module, and a `forward` whose parameters have the names of the
dataset's arrays. It knows nothing of the pipeline, of Flax or of Ray.
"""

import torch
from torch import nn


class Block(nn.Module):
    """Convolution, batch normalization, and what was there before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.normalization = nn.BatchNorm2d(channels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype stay."""
        return hidden + torch.relu(self.normalization(self.convolution(hidden)))


class DigitsNetwork(nn.Module):
    """Logits of the ten digits."""

    def __init__(self, channels: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(depth))
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels * 4 * 4, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32 [batch, 10] of float32 [batch, 1, 8, 8]."""
        hidden = torch.relu(self.stem(pixels))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.dropout(self.pool(hidden).flatten(1)))


def make(channels: int = 24, depth: int = 2, dropout: float = 0.2) -> nn.Module:
    """The factory that a flow names."""
    return DigitsNetwork(channels, depth, dropout)
