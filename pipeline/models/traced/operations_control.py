"""Control flow that torch exports as operations on graphs.

Owns branches, loops and scans. Knows nothing of how a graph is run: each operation is given `call`. The one decision:
torch's forms map to lax's own, so both branches are compiled and a loop is one body.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.program import GraphRef

Call = Callable[[GraphRef, Sequence[Any]], Any]
"""Runs a graph on these values and gives its output."""


def cond(call: Call, condition: Any, then: GraphRef, otherwise: GraphRef, operands: Sequence[Any] = ()) -> Any:
    """One of two graphs."""
    if isinstance(condition, bool):
        return call(then if condition else otherwise, operands)
    held, rest = _arrays(operands)

    def branch(graph: GraphRef) -> Callable[[Any], Any]:
        return lambda arrays: tuple(call(graph, rest(arrays)))

    return jax.lax.cond(jnp.reshape(condition, ()), branch(then), branch(otherwise), held)


def while_loop(
    call: Call, condition: GraphRef, body: GraphRef, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> Any:
    """A graph again and again, while another says so."""

    def goes_on(state: Any) -> Any:
        made = call(condition, [*state, *additional])
        return jnp.reshape(made[0] if isinstance(made, list | tuple) else made, ())

    def once(state: Any) -> Any:
        made = call(body, [*state, *additional])
        return tuple(jnp.asarray(new, old.dtype) for new, old in zip(made, state, strict=True))

    return jax.lax.while_loop(goes_on, once, tuple(jnp.asarray(value) for value in carried))


def scan(
    call: Call, body: GraphRef, initial: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """A graph over the first dim of `xs`, carrying state; the states' last values, then the stacked outputs."""
    num_states = len(initial)

    def step(state: Any, slices: Any) -> Any:
        made = call(body, [*state, *slices, *additional])
        return tuple(made[:num_states]), tuple(made[num_states:])

    state, outputs = jax.lax.scan(step, tuple(initial), tuple(xs))
    return (*state, *outputs)


def map_impl(call: Call, body: GraphRef, xs: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    """A graph for each slice of the first dim."""
    return jax.lax.map(lambda slices: tuple(call(body, [*slices, *additional])), tuple(xs))


def without_gradient(call: Call, enabled: bool, body: GraphRef, *operands: Any) -> Any:
    """A block under `torch.no_grad` or `enable_grad`."""
    made = call(body, operands)
    return made if enabled else jax.tree.map(_stopped, made)


def _stopped(value: Any) -> Any:
    return jax.lax.stop_gradient(value) if isinstance(value, jax.Array) else value


def autocast(call: Call, _device: str, _dtype: Any, _enabled: Any, _cache: Any, body: GraphRef, *operands: Any) -> Any:
    """A block under autocast; its casts are in the graph already."""
    return call(body, operands)


def _arrays(operands: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays among the operands, and how to put arrays back in their places; sizes are closed over."""
    places = [number for number, value in enumerate(operands) if hasattr(value, "dtype")]

    def filled(arrays: Sequence[Any]) -> list[Any]:
        whole = list(operands)
        for number, array in zip(places, arrays, strict=True):
            whole[number] = array
        return whole

    return [operands[number] for number in places], filled


CONTROL: Mapping[str, Callable[..., Any]] = {
    "higher_order.cond": cond,
    "higher_order.while_loop": while_loop,
    "higher_order.scan": scan,
    "higher_order.map_impl": map_impl,
    "higher_order.wrap_with_set_grad_enabled": without_gradient,
    "higher_order.wrap_with_autocast": autocast,
}
"""Every function takes `call` first."""
