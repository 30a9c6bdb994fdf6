"""Torch dtypes in JAX, and how torch promotes them.

Owns the table of dtypes and the promotion of mixed operands. Knows no operation. The one decision: wide integers and
floats become 32 bit ones, as everywhere in this house (x64 stays off); what was traced in 64 bit is checked to fit.

Promotion follows torch, not JAX: operands are ranked in three tiers (tensors with dimensions, zero-dimensional
tensors, Python numbers), and a lower tier only wins where it is of a higher category (bool < integer < float <
complex). `jnp.result_type` would turn bfloat16[3] + float32[] into float32; torch keeps bfloat16.
Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.errors import ParameterError

DTYPES: dict[str, Any] = {
    "float32": jnp.float32,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float64": jnp.float32,
    "int64": jnp.int32,
    "int32": jnp.int32,
    "int16": jnp.int16,
    "int8": jnp.int8,
    "uint8": jnp.uint8,
    "uint16": jnp.uint16,
    "uint32": jnp.uint32,
    "bool": jnp.bool_,
    "complex64": jnp.complex64,
    "complex128": jnp.complex64,
}
"""JAX dtype by torch name."""

SENTINELS = (-(2**63), 2**63 - 1)
"""The ends of int64, which stand for "no limit"."""

DEFAULT_FLOAT: Any = jnp.float32
"""What torch makes of a Python float."""


def jax_dtype(value: Any) -> Any:
    """The dtype of an array, or the one that torch gives a Python number."""
    if hasattr(value, "dtype"):
        return jnp.dtype(value.dtype)
    if isinstance(value, bool):
        return jnp.dtype(jnp.bool_)
    if isinstance(value, int):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.complex64 if isinstance(value, complex) else DEFAULT_FLOAT)


def category(dtype: Any) -> int:
    """0 for bools, 1 for integers, 2 for floats, 3 for complex numbers."""
    if dtype == jnp.bool_:
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return 1
    return 3 if jnp.issubdtype(dtype, jnp.complexfloating) else 2


def promoted_dtype(values: Sequence[Any]) -> Any:
    """The dtype in which torch computes with these operands."""
    tiers: list[list[Any]] = [[], [], []]
    for value in values:
        tier = 2 if not hasattr(value, "dtype") else (0 if np.ndim(value) else 1)
        tiers[tier].append(jax_dtype(value))
    result: Any = None
    for tier, dtypes in enumerate(tiers):
        for dtype in dtypes:
            if result is None:
                result = dtype
            elif not any(tiers[:tier]):
                result = jnp.promote_types(result, dtype)
            elif category(dtype) > category(result):
                result = _raised(result, dtype)
    return result


def _raised(result: Any, dtype: Any) -> Any:
    # A complex number on float tensors keeps their width; 16 bit complex does not exist here.
    return jnp.promote_types(result, dtype) if category(dtype) == 3 else dtype


def promote(*values: Any) -> list[jax.Array]:
    """Arrays of one dtype, that in which torch computes."""
    dtype = promoted_dtype(values)
    return [cast(value, dtype) for value in values]


def promote_float(*values: Any) -> list[jax.Array]:
    """As `promote`; integers and bools become floats."""
    dtype = promoted_dtype(values)
    dtype = dtype if category(dtype) >= 2 else jnp.dtype(DEFAULT_FLOAT)
    return [cast(value, dtype) for value in values]


def cast(value: Any, dtype: Any) -> jax.Array:
    """The value as an array of `dtype`.

    A Python integer wraps in narrow integers, as in torch; the ends of int64, which stand for "no limit", become the
    ends of int32.

    Raises:
        ParameterError: another integer does not fit 32 bit, which this house computes with.
    """
    if isinstance(value, int) and not isinstance(value, bool) and jnp.issubdtype(dtype, jnp.integer):
        value = _fitting(value, jnp.iinfo(dtype))
    if isinstance(value, float) and jnp.issubdtype(dtype, jnp.floating) and np.isfinite(value):
        limit = float(jnp.finfo(jnp.float32).max)
        value = min(max(value, -limit), limit)
    return jnp.asarray(value, dtype)


def _fitting(value: int, limits: Any) -> int:
    low, high = int(limits.min), int(limits.max)
    if low <= value <= high:
        return value
    if limits.bits < 32:
        return (value - low) % (1 << limits.bits) + low
    if value in SENTINELS:
        return low if value < 0 else high
    raise ParameterError(
        f"the program computes with the whole number {value}, which 32 bit cannot hold",
        hint="64 bit integers are not computed with; keep such numbers out of the module",
    )
