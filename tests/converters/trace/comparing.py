"""Torch expressions, traced and run in JAX, held against torch: values and gradients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from converters.trace.export import trace_module
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.module import TracedModule

VALUE_ERROR = 2e-6
"""Relative to the largest value. Seen: at most 8e-7 for single functions in float32."""
GRADIENT_ERROR = 1e-5
"""Seen: at most 3e-6."""

Tensors = Mapping[str, torch.Tensor]


class Several(torch.nn.Module):
    """All expressions on the same inputs: one export and one compile for many cases."""

    def __init__(self, expressions: Sequence[str], names: Iterable[str]) -> None:
        super().__init__()
        known = {"torch": torch, "F": torch.nn.functional, "inf": float("inf"), "nan": float("nan")}
        known["changed"] = changed
        self.functions = {text: eval(f"lambda {', '.join(names)}: {text}", known) for text in expressions}

    def forward(self, *tensors: torch.Tensor) -> dict[str, Any]:
        return {text: function(*tensors) for text, function in self.functions.items()}


def changed(x: torch.Tensor, place: Any, value: Any) -> torch.Tensor:
    """`x[place] = value`, on a copy."""
    copy = x.clone()
    copy[place] = value
    return copy


def traced(module: torch.nn.Module, *tensors: torch.Tensor) -> TracedModule:
    """The module as it runs in JAX."""
    trace = trace_module(module, args=tensors)
    return TracedModel(program=trace.program, constants=trace.constants).module({})


def value_differences(expressions: Sequence[str], inputs: Tensors, *, limit: float = VALUE_ERROR) -> list[str]:
    """What differs from torch, a line an expression; empty where all agree."""
    module = Several(expressions, inputs)
    tensors = tuple(inputs.values())
    program = traced(module, *tensors)
    wanted = module(*tensors)
    found = jax.jit(lambda *given: program(*given))(*(jnp.asarray(tensor.numpy()) for tensor in tensors))
    return [line for name, value in wanted.items() for line in _compared(name, value, found[name], limit)]


def gradient_differences(expressions: Sequence[str], inputs: Tensors) -> list[str]:
    """What differs from torch's gradients with respect to every float input."""
    module = Several(expressions, inputs)
    tensors = tuple(inputs.values())
    program = traced(module, *tensors)
    return _gradient_differences(module, program, tensors, [jnp.asarray(tensor.numpy()) for tensor in tensors])


def _compared(name: str, wanted: Any, found: Any, limit: float) -> list[str]:
    if isinstance(wanted, list | tuple):
        if len(wanted) != len(found):
            return [f"{name}: {len(found)} results, must be {len(wanted)}"]
        return [
            line
            for number, (one, other) in enumerate(zip(wanted, found, strict=True))
            for line in _compared(f"{name}[{number}]", one, other, limit)
        ]
    theirs, ours = wanted.detach().numpy(), np.asarray(found)
    if theirs.shape != ours.shape:
        return [f"{name}: shape {ours.shape}, must be {theirs.shape}"]
    narrow = {"float64": "float32", "int64": "int32", "complex128": "complex64"}
    if narrow.get(str(theirs.dtype), str(theirs.dtype)) != str(ours.dtype):
        return [f"{name}: dtype {ours.dtype}, must be {theirs.dtype}"]
    return _value_line(name, theirs, ours, limit)


def _value_line(name: str, theirs: Any, ours: Any, limit: float) -> list[str]:
    if theirs.size == 0:
        return []
    if theirs.dtype.kind in "biu":
        wrong = int((theirs != ours).sum())
        return [f"{name}: {wrong} of {theirs.size} differ: {theirs.ravel()[:6]} {ours.ravel()[:6]}"] if wrong else []
    same = np.isnan(theirs) & np.isnan(ours) | (theirs == ours)
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(theirs - ours))
    scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
    worst = float(np.nan_to_num(error, nan=np.inf).max()) / scale
    return [] if worst <= limit else [f"{name}: relative error {worst:.1e}"]


def _gradient_differences(
    module: Several, program: Any, tensors: tuple[torch.Tensor, ...], arrays: list[jax.Array]
) -> list[str]:
    """One backward pass a case, against random cotangents of its first float result."""
    places = [number for number, tensor in enumerate(tensors) if tensor.is_floating_point()]
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    outputs = {name: _first_float(value) for name, value in module(*leaves).items()}
    outputs = {name: value for name, value in outputs.items() if value is not None and value.requires_grad}
    torch.manual_seed(11)
    cotangents = {name: torch.randn_like(value) for name, value in outputs.items()}

    def picked(floats: list[jax.Array]) -> dict[str, Any]:
        given = list(arrays)
        for place, value in zip(places, floats, strict=True):
            given[place] = value
        made = program(*given)
        return {name: _first_float_array(made[name]) for name in outputs}

    @jax.jit
    def backward(floats: list[jax.Array], weights: dict[str, jax.Array]) -> Any:
        return jax.vjp(picked, floats)[1](weights)[0]

    zeros = {name: np.zeros(value.shape, np.float32) for name, value in cotangents.items()}
    lines = []
    for name, value in outputs.items():
        theirs = torch.autograd.grad(
            value, [leaves[place] for place in places], cotangents[name], retain_graph=True, allow_unused=True
        )
        ours = backward([arrays[place] for place in places], {**zeros, name: cotangents[name].numpy()})
        for place, wanted, found in zip(places, theirs, ours, strict=True):
            expected = np.zeros(found.shape, np.float32) if wanted is None else (wanted + 0).numpy()
            lines += _value_line(f"{name} (gradient of input {place})", expected, np.asarray(found), GRADIENT_ERROR)
    return lines


def _first_float(value: Any) -> torch.Tensor | None:
    values = value if isinstance(value, list | tuple) else [value]
    return next((item for item in values if item.is_floating_point()), None)


def _first_float_array(value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else [value]
    return next(item for item in values if jnp.issubdtype(item.dtype, jnp.floating))
