"""Arithmetic on sizes, which are plain Python numbers by the time a program runs.

Owns the operations that torch writes as Python's own. Knows nothing of tensors but their shapes. The one decision: a
size is read where the program says so, so the same program runs at any size its dimensions allow.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax


def size(x: jax.Array, dim: int) -> int:
    """Of one dim."""
    return int(x.shape[dim])


def numel(x: jax.Array) -> int:
    """Number of elements."""
    return int(x.size)


def stride(x: jax.Array, dim: int) -> int:
    """Of a contiguous tensor."""
    return math.prod(x.shape[dim % x.ndim + 1 :])


def storage_offset(_x: jax.Array) -> int:
    """Of a contiguous tensor."""
    return 0


def item(values: Any, number: int) -> Any:
    """One of several results."""
    return values[number]


def choose(condition: Any, first: Any, second: Any) -> Any:
    """`first` where the condition holds."""
    return first if condition else second


SYMBOLIC: Mapping[str, Callable[..., Any]] = {
    "aten.sym_size.int": size,
    "aten.size.int": size,
    "aten.sym_numel.default": numel,
    "aten.sym_stride.int": stride,
    "aten.sym_storage_offset.default": storage_offset,
    "sym.getitem": item,
    "sym.add": operator.add,
    "sym.iadd": operator.add,
    "sym.sub": operator.sub,
    "sym.mul": operator.mul,
    "sym.truediv": operator.truediv,
    "sym.floordiv": operator.floordiv,
    "sym.mod": operator.mod,
    "sym.pow": operator.pow,
    "sym.neg": operator.neg,
    "sym.eq": operator.eq,
    "sym.ne": operator.ne,
    "sym.lt": operator.lt,
    "sym.le": operator.le,
    "sym.gt": operator.gt,
    "sym.ge": operator.ge,
    "sym.and": operator.and_,
    "sym.or": operator.or_,
    "sym.not": operator.not_,
    "sym.max": max,
    "sym.min": min,
    "sym.int": int,
    "sym.float": float,
    "sym.sum": sum,
    "sym.ite": choose,
    "sym.sqrt": math.sqrt,
    "sym.ceil": math.ceil,
    "sym.floor": math.floor,
    "sym.trunc": math.trunc,
    "sym.round": round,
    "sym.abs": abs,
    "sym.log2": math.log2,
}
