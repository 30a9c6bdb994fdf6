"""Modules of a user's own, right and wrong; importable by name as a flow's factory is."""

import random
from typing import Any

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, width: int = 6, classes: int = 3, dropout: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(2)
        )
        self.register_buffer("seen", torch.zeros(1))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width * 12, classes)

    def forward(self, pixels: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += pixels.sum()
        hidden = self.stem(pixels) * weight[:, None, None, None]
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(self.dropout(hidden.flatten(1))), "hidden": hidden}


class Line(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make(width: int = 6, classes: int = 3, dropout: float = 0.3) -> nn.Module:
    return Network(width, classes, dropout)


def make_line(outputs: int = 2) -> nn.Module:
    return Line(outputs)


def make_class() -> Any:
    return Network


def make_random() -> nn.Module:
    module = Line()
    with torch.no_grad():
        module.layers[0].weight.fill_(random.random())
    return module


def make_double() -> nn.Module:
    return Line().double()


def make_frozen() -> nn.Module:
    return Line().requires_grad_(False)


def make_scalar() -> nn.Module:
    module = Line()
    module.scale = nn.Parameter(torch.tensor(1.0))
    return module


def make_tuple() -> nn.Module:
    module = Line()
    module.forward = lambda x: (module.layers(x), x)
    return module


def make_failing() -> nn.Module:
    return nn.Sequential()  # its forward takes `input`


class Reaching(nn.Module):
    """Uses a block's parameter without calling the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layers[0].weight, self.layers[0].bias)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def make_reaching() -> nn.Module:
    return Reaching()


def make_narrow() -> nn.Module:
    return Narrow()
