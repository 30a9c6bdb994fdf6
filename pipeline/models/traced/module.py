"""A traced program as a Flax NNX module.

Owns the tree of leaves under their torch names, the call with torch's signature, and the checks of what goes in. Knows
nothing of files and of torch. The one decision: a leaf's path is its torch name, and a parameter that torch ties under
several names is one variable under one of them, so nothing can come apart.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.traced.call import bound_inputs
from pipeline.models.traced.interpreter import Interpreter
from pipeline.models.traced.program import Program
from pipeline.models.variables import Buffer

EMBEDDED_BYTES = 1 << 14
"""Constants up to this size are part of the compiled program; larger ones are arguments of it, held once."""
_OWN = ("_interpreter", "_constants", "_rngs")


class Constant(nnx.Variable[Any]):
    """A tensor of the graph that no checkpoint holds; not a leaf."""


class Names(nnx.Module):
    """A torch module's place in the tree: its parameters, buffers and submodules by name."""


class TracedModule(nnx.Module):
    """A torch module, in JAX.

    Args:
        interpreter: the program with its small constants.
        leaves: array (or abstract array) by torch name; every leaf of the program.
        constants: the program's larger constants.
        rngs: where random operations draw from when a call gives none.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        *,
        leaves: Mapping[str, Any],
        constants: Mapping[str, Any],
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._rngs = rngs
        self._constants = Names()
        for name, value in constants.items():
            _set(self._constants, name, Constant(value))
        for name, leaf in interpreter.program.leaves.items():
            if name.partition(".")[0] in _OWN:
                raise ParameterError(f"{interpreter.program.name}: a torch name may not begin with {name!r}")
            _set(self, name, (nnx.Param if leaf.kind == "parameter" else Buffer)(leaves[name]))

    def __call__(self, *args: Any, rngs: nnx.Rngs | None = None, **kwargs: Any) -> Any:
        """Call with the arguments of the torch module's `forward`; gives its output tree (named outputs as a dict).

        Raises:
            ParameterError: an argument is missing, has another shape or dtype, or was fixed by the trace to another
                value; or the program draws random numbers and has no rngs. Lists every complaint.
        """
        program = self._interpreter.program
        source = self._rngs if rngs is None else rngs

        def make_key() -> jax.Array:
            if source is None:
                raise ParameterError(
                    f"{program.name}: draws random numbers (it was traced in "
                    f"{'training' if program.is_training else 'evaluation'} mode) and was given no rngs",
                    hint="call it with `rngs=nnx.Rngs(seed)`, or trace the module in evaluation mode",
                )
            return source.dropout()

        run = self._interpreter.run(
            leaves={name: _get(self, name)[...] for name in program.leaves},
            constants={
                name: _get(self._constants, name)[...]
                for name in program.constants
                if name not in self._interpreter.constants
            },
            inputs=bound_inputs(program, args, kwargs),
            make_key=make_key,
        )
        for name, value in run.mutations.items():
            variable = _get(self, name)
            variable.set_value(value.astype(variable.get_value().dtype))
        return run.output


def interpreter_and_constants(
    program: Program, constants: Mapping[str, np.ndarray[Any, Any]]
) -> tuple[Interpreter, dict[str, jax.Array]]:
    """The program with its small constants, and the large ones as arrays."""
    small = {name: value for name, value in constants.items() if value.nbytes <= EMBEDDED_BYTES}
    large = {name: jnp.asarray(value) for name, value in constants.items() if name not in small}
    return Interpreter(program, constants=small), large


def _set(owner: Any, name: str, variable: Any) -> None:
    *parents, last = name.split(".")
    for key in parents:
        if key not in vars(owner):  # a torch name may be that of a method of `nnx.Module`
            setattr(owner, key, Names())
        owner = getattr(owner, key)
    setattr(owner, last, variable)


def _get(owner: Any, name: str) -> Any:
    for key in name.split("."):
        owner = getattr(owner, key)
    return owner
