"""The program of a traced torch module: what a graph of ATen calls is, in memory.

Owns its data types and the walks over their arguments. Knows neither torch, JAX nor JSON. The one decision: sizes are
never symbols in here. A size that varies is read from the inputs' shapes by nodes of the graph, so a program is plain
data and one program serves every shape its dimensions allow.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = 1
"""Raised by hand when older readers would misunderstand a program."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value made earlier in the same graph."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype by its name: `float32`, `int64`, `bool`."""

    name: str


@dataclass(frozen=True, slots=True)
class GraphRef:
    """A graph of the program that an operation calls (a branch, a loop's body)."""

    name: str


Argument = Any
"""None, bool, int, float, complex, str, Ref, Dtype, GraphRef, or a list, tuple or dict (str keys) of arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One call."""

    name: str
    """Of its result."""
    operation: str
    """ATen overload (`aten.add.Tensor`) or symbolic arithmetic (`sym.mul`)."""
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument] = field(default_factory=dict)
    module: str = ""
    """Path of the torch module that called it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Calls in order."""

    inputs: tuple[str, ...]
    """Names of the values given from outside."""
    nodes: tuple[Node, ...]
    output: Argument
    """A tree of arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One parameter or persistent buffer, by its torch name."""

    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    """Further torch names of the same tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One tensor that the module is called with."""

    shape: tuple[int | str, ...]
    """A number is fixed; a name is a dimension that may vary; the same name is the same size everywhere."""
    dtype: str
    low: int = 0
    high: int = 2
    """Integers of examples lie in [low, high)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """The sizes that a named dimension may have."""

    low: int
    high: int | None
    """Inclusive; None is without limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Where a value of the main graph comes from."""

    source: Literal["leaf", "constant", "input"]
    name: str
    """Torch name of a leaf, name of a constant, or path of an input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A traced module without its weights."""

    name: str
    """Class of the torch module."""
    dtype: str
    """Of most of its float parameters; casts to it follow the dtype that the leaves are loaded in."""
    parameters: tuple[str, ...]
    """The names of `forward`'s parameters that were given, in its order."""
    arguments: Mapping[str, Argument]
    """By parameter: a tree whose tensors are `Ref` to paths of `inputs`; everything else was fixed by the trace."""
    inputs: Mapping[str, Input]
    dimensions: Mapping[str, Dimension]
    leaves: Mapping[str, Leaf]
    constants: Mapping[str, str]
    """Dtype by name of the tensors in `constants.safetensors`."""
    bindings: Mapping[str, Binding]
    """By name of the main graph's inputs."""
    graph: Graph
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    mutations: Mapping[str, str] = field(default_factory=dict)
    """Value that a buffer has after the call, by torch name."""
    taps: tuple[tuple[str, str], ...] = ()
    """Module path and the value it gave, in the order in which the modules ran."""
    is_training: bool = False

    def nodes(self) -> Iterator[Node]:
        """Of every graph."""
        yield from self.graph.nodes
        for graph in self.graphs.values():
            yield from graph.nodes


def refs(argument: Argument) -> Iterator[str]:
    """Names of the values that an argument uses."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from refs(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from refs(item)


def node_refs(node: Node) -> Iterator[str]:
    """Names of the values that a node uses."""
    yield from refs(list(node.arguments))
    yield from refs(dict(node.keywords))


def substituted(argument: Argument, values: Mapping[str, Any]) -> Any:
    """The argument with every `Ref` replaced by its value."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, list):
        return [substituted(item, values) for item in argument]
    if isinstance(argument, tuple):
        return tuple(substituted(item, values) for item in argument)
    if isinstance(argument, dict):
        return {key: substituted(item, values) for key, item in argument.items()}
    return argument
