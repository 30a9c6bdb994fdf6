"""A program runs: one JAX call after another.

Owns the walk over a program's graphs, the dtype of a run, and where random keys come from. Knows nothing of modules and
files. The one decision: there is no compiler here. The walk happens while JAX traces, so jit, grad and vmap see plain
JAX, and a run costs nothing once compiled.

The dtype of a run: leaves are never used in less precision than the trace had or than they hold. A program traced in
bfloat16 whose leaves are loaded in float32 runs in float32 throughout (casts to the model's own dtype follow); one
traced in float32 with bfloat16 leaves widens them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.errors import ParameterError
from pipeline.models.traced.dtypes import DTYPES
from pipeline.models.traced.operations import CALLING, DRAWING, PURE
from pipeline.models.traced.program import Dtype, Graph, GraphRef, Program, Ref, node_refs, refs, substituted
from pipeline.models.traced.program_text import program_text
from pipeline.models.variables import tap

MakeKey = Callable[[], jax.Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run gave."""

    output: Any
    """In the tree that torch returns; named outputs are dicts."""
    mutations: Mapping[str, jax.Array]
    """New value by buffer."""


class Interpreter:
    """A program that is ready to run, with the constants that are small enough to be part of it.

    Equal where program and constants are equal, so that jit's cache holds across loads.
    """

    def __init__(self, program: Program, *, constants: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.program = program
        with jax.ensure_compile_time_eval():  # real arrays, even where the module is made inside a transformation
            self.constants = {name: jnp.asarray(value) for name, value in constants.items()}
        digest = hashlib.sha256(program_text(program).encode())
        for name in sorted(self.constants):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(constants[name]).tobytes())
        self.digest = digest.hexdigest()
        self._released = {id(graph): _released(graph) for graph in (program.graph, *program.graphs.values())}
        taps: dict[str, list[str]] = {}
        for path, value in program.taps:
            taps.setdefault(value, []).append(path)
        self._taps = taps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interpreter) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Interpreter({self.program.name}, {len(self.program.graph.nodes)} operations)"

    def run(
        self,
        *,
        leaves: Mapping[str, jax.Array],
        constants: Mapping[str, jax.Array],
        inputs: Mapping[str, jax.Array],
        make_key: MakeKey,
    ) -> Run:
        """Run the main graph.

        Args:
            leaves: by torch name.
            constants: those that are not part of the interpreter.
            inputs: by path, already checked.
            make_key: gives one key; called once at most, and only where the program draws.
        """
        run_dtype = self.run_dtype(leaves)
        owners: dict[str, Mapping[str, Any]] = {
            "leaf": {name: self._leaf(name, value, run_dtype) for name, value in leaves.items()},
            "constant": {**self.constants, **constants},
            "input": {name: self._input(name, value, run_dtype) for name, value in inputs.items()},
        }
        values = {name: owners[b.source][b.name] for name, b in self.program.bindings.items()}
        walk = _Walk(self, run_dtype=run_dtype, make_key=make_key)
        for name in self.program.graph.inputs:
            self.tapped(name, values[name])
        kept = {*self.program.mutations.values()}
        output = walk.run(self.program.graph, values, kept=kept)
        return Run(output=output, mutations={name: values[made] for name, made in self.program.mutations.items()})

    def run_dtype(self, leaves: Mapping[str, jax.Array]) -> Any:
        """The dtype that stands for the program's own in a run with these leaves."""
        program = self.program
        sizes: dict[Any, int] = {}
        for name, leaf in program.leaves.items():
            if leaf.dtype == program.dtype and name in leaves:
                dtype = jnp.dtype(leaves[name].dtype)
                sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(leaf.shape))
        traced = jnp.dtype(DTYPES[program.dtype])
        if not sizes or not jnp.issubdtype(traced, jnp.floating):
            return traced
        return jnp.promote_types(traced, max(sizes, key=lambda dtype: sizes[dtype]))

    def dtype(self, name: str, run_dtype: Any) -> Any:
        """A torch dtype in this run."""
        return run_dtype if name == self.program.dtype else jnp.dtype(DTYPES[name])

    def tapped(self, name: str, value: Any) -> None:
        """Note the value under the modules that gave it."""
        for path in self._taps.get(name, ()):
            tap(path, value)

    def released(self, graph: Graph) -> Mapping[str, tuple[str, ...]]:
        """By node, the values that nothing after it uses."""
        return self._released[id(graph)]

    def _leaf(self, name: str, value: jax.Array, run_dtype: Any) -> jax.Array:
        wanted = self.dtype(self.program.leaves[name].dtype, run_dtype)
        if not jnp.issubdtype(wanted, jnp.floating):
            return value.astype(wanted)
        return value.astype(jnp.promote_types(value.dtype, wanted))

    def _input(self, name: str, value: jax.Array, run_dtype: Any) -> jax.Array:
        return value.astype(self.dtype(self.program.inputs[name].dtype, run_dtype))


class _Walk:
    """One run over a program's graphs."""

    def __init__(self, interpreter: Interpreter, *, run_dtype: Any, make_key: MakeKey) -> None:
        self._interpreter = interpreter
        self._run_dtype = run_dtype
        self._make_key = make_key
        self._num_draws = 0
        self._key: jax.Array | None = None
        # Inside a branch or a loop a key from outside cannot be made any more.
        if any(node.operation in DRAWING for graph in interpreter.program.graphs.values() for node in graph.nodes):
            self._key = self._only_if_drawing()

    def run(self, graph: Graph, values: dict[str, Any], *, kept: set[str]) -> Any:
        """Run `graph` on `values`, which gains the values in `kept` and those of the output."""
        released = self._interpreter.released(graph)
        is_main = graph is self._interpreter.program.graph
        for node in graph.nodes:
            arguments = [self._resolved(argument, values) for argument in node.arguments]
            keywords = {key: self._resolved(argument, values) for key, argument in node.keywords.items()}
            try:
                values[node.name] = self._called(node.operation, arguments, keywords)
            except Exception as error:
                error.add_note(f"in {node.operation} ({node.name}) of the torch module {node.module or '(root)'}")
                raise
            if is_main:
                self._interpreter.tapped(node.name, values[node.name])
            for name in released[node.name]:
                if name not in kept:
                    del values[name]
        return substituted(graph.output, values)

    def _called(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation in PURE:
            return PURE[operation](*arguments, **keywords)
        if operation in DRAWING:
            return DRAWING[operation](self._draw, *arguments, **keywords)
        return CALLING[operation](self._call, *arguments, **keywords)

    def _call(self, graph: GraphRef, operands: Sequence[Any]) -> Any:
        inner = self._interpreter.program.graphs[graph.name]
        return self.run(inner, dict(zip(inner.inputs, operands, strict=True)), kept=set())

    def _draw(self) -> jax.Array:
        if self._key is None:
            self._key = self._make_key()
        self._num_draws += 1
        return jax.random.fold_in(self._key, self._num_draws)

    def _only_if_drawing(self) -> jax.Array | None:
        try:
            return self._make_key()
        except ParameterError:
            return None  # raised again by the operation that does draw, if one does

    def _resolved(self, argument: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(argument, Ref):
            return values[argument.name]
        if isinstance(argument, Dtype):
            return self._interpreter.dtype(argument.name, self._run_dtype)
        if isinstance(argument, list | tuple):
            return [self._resolved(item, values) for item in argument]
        return argument


def _released(graph: Graph) -> dict[str, tuple[str, ...]]:
    """By node, the values of which it is the last user, so that a run without jit holds no more than it needs."""
    last: dict[str, str] = {}
    for node in graph.nodes:
        last[node.name] = node.name
        for name in node_refs(node):
            last[name] = node.name
    for name in refs(graph.output):
        last.pop(name, None)
    released: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for name, user in last.items():
        released[user].append(name)
    return {name: tuple(names) for name, names in released.items()}
