"""ATen recurrent networks.

Owns LSTM, GRU and the plain network, over padded sequences. Knows nothing of programs. The one decision: one `lax.scan`
a layer and direction, with the input's product outside of it, so that compiling does not grow with the length.

Shape suffixes: T steps, B batch, D input, H hidden. Weights are torch's: [gates * H, D], gates in its order (LSTM i f g
o; GRU r z n). Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.operations_linear import linear
from pipeline.models.traced.operations_random import Draw, dropout

State = tuple[jax.Array, ...]
Step = Callable[[State, jax.Array, Sequence[jax.Array]], State]
"""From the state, the input's share of the gates and the weights to the next state; its first part is the output."""


def _lstm_step(state: State, gates: jax.Array, recurrent: Sequence[jax.Array]) -> State:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + linear(hidden, *recurrent[:2]), 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    # A projection makes the output smaller than the cell.
    return (linear(hidden, recurrent[2]) if len(recurrent) > 2 else hidden), cell


def _gru_step(state: State, gates: jax.Array, recurrent: Sequence[jax.Array]) -> State:
    (hidden,) = state
    r, z, n = jnp.split(gates, 3, axis=-1)
    hr, hz, hn = jnp.split(linear(hidden, *recurrent[:2]), 3, axis=-1)
    z = jax.nn.sigmoid(z + hz)
    n = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
    return ((1 - z) * n + z * hidden,)


def _plain_step(activation: Callable[[jax.Array], jax.Array]) -> Step:
    def step(state: State, gates: jax.Array, recurrent: Sequence[jax.Array]) -> State:
        return (activation(gates + linear(state[0], *recurrent[:2])),)

    return step


def _direction(
    x_TBD: jax.Array, state: State, weights: Sequence[jax.Array], step: Step, *, is_reverse: bool, has_biases: bool
) -> tuple[jax.Array, State]:
    """One layer in one direction."""
    input_bias = weights[2] if has_biases else None
    gates = linear(x_TBD, weights[0], input_bias)
    hidden_bias = weights[3] if has_biases else jnp.zeros(weights[1].shape[:1], x_TBD.dtype)
    recurrent = [weights[1], hidden_bias, *weights[4 if has_biases else 2 :]]

    def body(carry: State, gates_BH: jax.Array) -> tuple[State, jax.Array]:
        carry = step(carry, gates_BH, recurrent)
        return carry, carry[0]

    last, outputs = jax.lax.scan(body, state, gates, reverse=is_reverse)
    return outputs, last


def _stacked(
    step: Step,
    draw: Draw,
    x: jax.Array,
    initial: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[jax.Array, ...]:
    """All layers; returns the output and each part of the last states, [layers * directions, B, H]."""
    is_batched = x.ndim == 3
    if not is_batched:
        x, initial = x[:, None], [part[:, None] for part in initial]
    elif batch_first:
        x = x.swapaxes(0, 1)
    num_directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * num_directions)
    lasts: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            number = layer * num_directions + direction
            state = tuple(part[number] for part in initial)
            own = weights[number * each : (number + 1) * each]
            made, last = _direction(x, state, own, step, is_reverse=direction == 1, has_biases=has_biases)
            outputs.append(made)
            lasts.append(last)
        x = jnp.concatenate(outputs, axis=-1) if bidirectional else outputs[0]
        if train and dropout_p > 0 and layer < num_layers - 1:
            x = dropout(draw, x, dropout_p, True)
    parts = [jnp.stack([last[number] for last in lasts]) for number in range(len(initial))]
    if not is_batched:
        return (x[:, 0], *(part[:, 0] for part in parts))
    return (x.swapaxes(0, 1) if batch_first else x, *parts)


def lstm(draw: Draw, x: jax.Array, initial: Sequence[jax.Array], *rest: Any) -> tuple[jax.Array, ...]:
    """Output, last hidden state, last cell."""
    return _stacked(_lstm_step, draw, x, initial, *rest)


def gru(draw: Draw, x: jax.Array, initial: jax.Array, *rest: Any) -> tuple[jax.Array, ...]:
    """Output and last hidden state."""
    return _stacked(_gru_step, draw, x, [initial], *rest)


def rnn_tanh(draw: Draw, x: jax.Array, initial: jax.Array, *rest: Any) -> tuple[jax.Array, ...]:
    """Output and last hidden state."""
    return _stacked(_plain_step(jnp.tanh), draw, x, [initial], *rest)


def rnn_relu(draw: Draw, x: jax.Array, initial: jax.Array, *rest: Any) -> tuple[jax.Array, ...]:
    """Output and last hidden state."""
    return _stacked(_plain_step(jax.nn.relu), draw, x, [initial], *rest)


RECURRENT: Mapping[str, Callable[..., Any]] = {
    "aten.lstm.input": lstm,
    "aten.gru.input": gru,
    "aten.rnn_tanh.input": rnn_tanh,
    "aten.rnn_relu.input": rnn_relu,
}
"""Every function takes `draw` first, for the dropout between layers."""
