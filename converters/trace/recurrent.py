"""Recurrent layers as one operation each, so that the length of a sequence stays open.

Owns torch operators that stand for `lstm`, `gru` and the plain networks during export. Knows nothing of programs. The
one decision: torch's own would be unrolled step by step while their shapes are worked out, which fixes the length;
these only say what shape comes out, and the program runs them as scans.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import rnn as torch_rnn

_SINGLE = ("gru", "rnn_tanh", "rnn_relu")
STANDS_FOR = {f"pipeline.{name}.default": f"aten.{name}.input" for name in ("lstm", *_SINGLE)}
"""The operation of a program by the operator that stood for it."""


def _outputs(
    x: torch.Tensor, states: Sequence[torch.Tensor], bidirectional: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Empty outputs and last states: the shapes are those of the input and of the first states."""
    size = states[0].shape[-1] * (2 if bidirectional else 1)
    return x.new_empty((*x.shape[:-1], size)), [torch.empty_like(state) for state in states]


@torch.library.custom_op("pipeline::lstm", mutates_args=())
def _lstm(
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.aten.lstm.input(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


@_lstm.register_fake
def _(
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, (hidden, cell) = _outputs(x, hx, bidirectional)
    return output, hidden, cell


def _single(name: str) -> Callable[..., Any]:
    """The operator for a layer with one state."""

    def layer(
        x: torch.Tensor,
        hx: torch.Tensor,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(torch.ops.aten, name).input(
            x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )

    def shapes(
        x: torch.Tensor,
        hx: torch.Tensor,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, (hidden,) = _outputs(x, [hx], bidirectional)
        return output, hidden

    operator = torch.library.custom_op(f"pipeline::{name}", layer, mutates_args=())
    operator.register_fake(shapes)
    return operator


_OPERATORS: dict[str, Callable[..., Any]] = {"lstm": _lstm, **{name: _single(name) for name in _SINGLE}}


@contextmanager
def whole_layers() -> Iterator[None]:
    """Inside the block torch's recurrent modules call these operators; packed sequences still call torch's."""
    kept = {name: getattr(torch_rnn._VF, name) for name in _OPERATORS}
    try:
        for name, operator in _OPERATORS.items():
            setattr(torch_rnn._VF, name, _choice(operator, kept[name]))
        yield
    finally:
        for name in kept:
            delattr(torch_rnn._VF, name)  # back to torch's own lookup


def _choice(operator: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor, second: Any, third: Any, *rest: Any) -> Any:
        is_packed = isinstance(third, torch.Tensor) or len(rest) < 6
        if is_packed:
            return original(x, second, third, *rest)
        state = list(second) if isinstance(second, tuple) else second
        return operator(x, state, list(third), *rest)

    return call
