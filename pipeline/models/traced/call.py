"""What a traced module is called with, held against what it was traced with.

Owns the binding of arguments and the checks of shapes, dtypes and fixed values. Knows nothing of how a program runs.
The one decision: sizes that the trace left open are taken from the arrays, and every complaint is raised at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.errors import ParameterError
from pipeline.models.traced.dtypes import DTYPES, category
from pipeline.models.traced.program import Argument, Program, Ref, refs

_INT32 = np.iinfo(np.int32)


def bound_inputs(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a call by path, in the dtypes of this house.

    Raises:
        ParameterError: something does not fit; lists every complaint.
    """
    complaints: list[str] = []
    if len(args) > len(program.parameters):
        complaints.append(f"takes {len(program.parameters)} positional arguments, got {len(args)}")
    given = dict(zip(program.parameters, args, strict=False))
    complaints += [f"{name}: given twice" for name in kwargs if name in given]
    given.update(kwargs)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in program.arguments:
            _collect(program.arguments[name], value, name, found=found, complaints=complaints)
        elif value is not None:
            complaints.append(f"{name}: the module was traced without it; allowed: {', '.join(program.parameters)}")
    complaints += [
        f"{name}: missing" for name in program.arguments if name not in given and any(refs(program.arguments[name]))
    ]
    arrays = {path: value for path, value in found.items() if _fits(program, path, value, complaints)}
    if not complaints:
        complaints = _size_complaints(program, arrays)
    if complaints:
        raise ParameterError(
            f"{program.name}: the call does not fit the traced program:\n"
            + "\n".join(f"  {complaint}" for complaint in complaints),
            hint="trace the module again with inputs like these, if they are meant",
        )
    return {path: jnp.asarray(value, _plain_dtype(program, path, value)) for path, value in arrays.items()}


def _plain_dtype(program: Program, path: str, value: Any) -> Any:
    # Floats keep their dtype until the run decides; whole numbers are int32 from here on.
    declared = DTYPES[program.inputs[path].dtype]
    return None if jnp.issubdtype(declared, jnp.inexact) else declared


def _collect(tree: Argument, value: Any, path: str, *, found: dict[str, Any], complaints: list[str]) -> None:
    if isinstance(tree, Ref):
        found[tree.name] = value
    elif isinstance(tree, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(tree):
            complaints.append(f"{path}: must be a sequence of {len(tree)}")
            return
        for number, (part, item) in enumerate(zip(tree, value, strict=True)):
            _collect(part, item, f"{path}.{number}", found=found, complaints=complaints)
    elif isinstance(tree, dict):
        if not isinstance(value, Mapping) or set(value) != set(tree):
            complaints.append(f"{path}: must have the keys {', '.join(tree)}")
            return
        for key, part in tree.items():
            _collect(part, value[key], f"{path}.{key}", found=found, complaints=complaints)
    elif isinstance(value, jax.Array | np.ndarray) or value != tree:
        complaints.append(f"{path}: was fixed by the trace to {tree!r}")


def _fits(program: Program, path: str, value: Any, complaints: list[str]) -> bool:
    spec = program.inputs[path]
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        complaints.append(f"{path}: must be an array, found {type(value).__name__}")
        return False
    declared = jnp.dtype(DTYPES[spec.dtype])
    # A mask may be given as bools where the trace had whole numbers.
    if category(value.dtype) != category(declared) and (category(value.dtype), category(declared)) != (0, 1):
        complaints.append(f"{path}: dtype {value.dtype}, must be {spec.dtype}")
        return False
    if len(value.shape) != len(spec.shape):
        complaints.append(f"{path}: shape {tuple(value.shape)}, must be {_shown(spec.shape)}")
        return False
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
        low, high = int(value.min()), int(value.max())
        if low < _INT32.min or high > _INT32.max:
            complaints.append(f"{path}: holds numbers from {low} to {high}; 32 bit integers are computed with")
            return False
    return True


def _size_complaints(program: Program, arrays: Mapping[str, Any]) -> list[str]:
    complaints = []
    sizes: dict[str, tuple[int, str]] = {}
    for path, value in arrays.items():
        for axis, (wanted, size) in enumerate(zip(program.inputs[path].shape, value.shape, strict=True)):
            if isinstance(wanted, int):
                if size != wanted:
                    shape = _shown(program.inputs[path].shape)
                    complaints.append(f"{path}: shape {tuple(value.shape)}, must be {shape}")
                continue
            known, owner = sizes.setdefault(wanted, (size, path))
            limits = program.dimensions[wanted]
            if size != known:
                complaints.append(f"{path}: {wanted} (axis {axis}) is {size}, but {known} in {owner}")
            elif size < limits.low or (limits.high is not None and size > limits.high):
                top = "any" if limits.high is None else limits.high
                complaints.append(f"{path}: {wanted} (axis {axis}) is {size}, allowed: {limits.low} to {top}")
    return complaints


def _shown(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))})"
