"""What a traced module is called with.

Owns the reading of example inputs, open sizes and their limits from an exported program. Knows nothing of nodes. The
one decision: sizes carry the names the caller gave them; a size that export found to be fixed is a number, and says so.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from pipeline.models.traced.program import Argument, Dimension, Input, Ref

_RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.clone", "aten.to.", "aten._to_copy", "aten.slice")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The call of a program."""

    parameters: tuple[str, ...]
    arguments: Mapping[str, Argument]
    inputs: Mapping[str, Input]
    dimensions: Mapping[str, Dimension]
    paths: Mapping[str, str]
    """Path of an input by the name of its placeholder."""


def read_signature(
    exported: ExportedProgram,
    *,
    module: torch.nn.Module,
    dynamic: Mapping[str, Mapping[int, str]],
) -> Signature:
    """The names, shapes and open sizes of an exported program's inputs."""
    args, kwargs = exported.example_inputs
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    named = _flattened(module, given)
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    order = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    leaves = pytree.tree_leaves((args, kwargs))
    paths_by_leaf = _paths(named, args, kwargs)
    inputs: dict[str, Input] = {}
    dimensions: dict[str, Dimension] = {}
    paths: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for name, leaf, path in zip(order, leaves, paths_by_leaf, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        value = placeholders[name].meta["val"]
        sizes = [
            int(size)
            if _is_fixed(size)
            else _named(exported, size, dynamic.get(path, {}).get(axis), symbols, dimensions)
            for axis, size in enumerate(value.shape)
        ]
        limit = _num_rows(placeholders[name]) or 2
        dtype = str(value.dtype).removeprefix("torch.")
        inputs[path] = Input(shape=tuple(sizes), dtype=dtype, high=limit)
        paths[name] = path
    return Signature(
        parameters=tuple(named),
        arguments={name: _tree(value, name) for name, value in named.items()},
        inputs=inputs,
        dimensions=dimensions,
        paths=paths,
    )


def _num_rows(value: torch.fx.Node) -> int | None:
    """The size of the table that an input looks up, perhaps in another shape: what its integers are below."""
    for user in value.users:
        name = str(user.target)
        if name == "aten.embedding.default" and user.args[1] is value:
            return int(user.args[0].meta["val"].shape[0])
        if name.startswith(_RESHAPES):
            found = _num_rows(user)
            if found is not None:
                return found
    return None


def _flattened(module: torch.nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; those of `*args` are numbered, those of `**kwargs` keep their names."""
    parameters = inspect.signature(module.forward).parameters
    named: dict[str, Any] = {}
    for name, value in given.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}.{number}": item for number, item in enumerate(value)})
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _paths(named: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The path of every leaf of `(args, kwargs)`, in torch's order."""
    tops = [*list(named)[: len(args)], *kwargs]
    values = [*args, *kwargs.values()]
    found: list[str] = []
    for top, value in zip(tops, values, strict=True):
        found += [".".join((top, *map(_key, path))) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    return found


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _tree(value: Any, path: str) -> Argument:
    if isinstance(value, torch.Tensor):
        return Ref(path)
    if isinstance(value, list):
        return [_tree(item, f"{path}.{number}") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_tree(item, f"{path}.{number}") for number, item in enumerate(value))
    if isinstance(value, dict):
        return {str(key): _tree(item, f"{path}.{key}") for key, item in value.items()}
    return value


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_Integer)


def _named(
    exported: ExportedProgram,
    size: Any,
    wanted: str | None,
    symbols: dict[str, str],
    dimensions: dict[str, Dimension],
) -> str:
    """The name of an open size; one name for one symbol, and for symbols that the caller gave one name."""
    expression = size.node.expr
    key = str(expression)
    if key not in symbols:
        symbols[key] = wanted if expression.is_symbol and wanted else key
    name = symbols[key]
    limits = exported.range_constraints.get(expression)
    low, high = (int(limits.lower), limits.upper) if limits is not None else (0, None)
    known = dimensions.get(name, Dimension(low=0, high=None))
    # Export takes sizes from 2 on only because it treats 0 and 1 apart; the program has no such need.
    low = 1 if low == 2 else low
    top = int(high) if high is not None and getattr(high, "is_Integer", False) else None
    tops = [limit for limit in (known.high, top) if limit is not None]
    dimensions[name] = Dimension(low=max(low, known.low), high=min(tops) if tops else None)
    return name
