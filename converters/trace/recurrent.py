"""Recurrent layers as one operation each, so that the length of a sequence stays open.

Owns torch operators that stand for `lstm`, `gru` and the plain networks during export. Knows nothing of programs. The
one decision: torch's own would be unrolled step by step while their shapes are worked out, which fixes the length;
these only say what shape comes out, and the program runs them as scans.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import rnn as torch_rnn

_SINGLE = ("gru", "rnn_tanh", "rnn_relu")
STANDS_FOR = {f"pipeline.{name}.default": f"aten.{name}.input" for name in ("lstm", *_SINGLE)}
"""The operation of a program by the operator that stood for it."""


_REST = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)
_SCHEMAS = {
    "lstm": f"(Tensor x, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)",
    **dict.fromkeys(_SINGLE, f"(Tensor x, Tensor hx, {_REST}) -> (Tensor, Tensor)"),
}
"""Those of torch's own operators for padded sequences."""


def _operator(name: str, schema: str) -> Callable[..., Any]:
    def layer(*arguments: Any) -> Any:
        return getattr(torch.ops.aten, name).input(*arguments)

    def shapes(x: torch.Tensor, hx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Empty outputs and last states: the shapes are those of the input and of the first states."""
        *_, bidirectional, _batch_first = rest
        states = [hx] if isinstance(hx, torch.Tensor) else hx
        size = states[0].shape[-1] * (2 if bidirectional else 1)
        return x.new_empty((*x.shape[:-1], size)), *(torch.empty_like(state) for state in states)

    operator = torch.library.custom_op(f"pipeline::{name}", layer, mutates_args=(), schema=schema)
    operator.register_fake(shapes)
    return operator


_OPERATORS: dict[str, Callable[..., Any]] = {name: _operator(name, schema) for name, schema in _SCHEMAS.items()}


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
