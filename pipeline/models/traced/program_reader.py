"""The reading of a program's text, strict.

Owns what is and is not a program. Knows nothing of files and of what operations do. The one decision: nothing in the
text is evaluated or imported, every name must be defined before it is used, and whatever is not exactly a program is
refused with the place where it is wrong.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.models.traced.dtypes import DTYPES
from pipeline.models.traced.operations import is_supported
from pipeline.models.traced.program import (
    VERSION,
    Argument,
    Binding,
    Dimension,
    Dtype,
    Graph,
    GraphRef,
    Input,
    Leaf,
    Node,
    Program,
    Ref,
    node_refs,
    refs,
)

_NAME = re.compile(r"[^\x00-\x1f]{1,512}")
_MAX_DEPTH = 64


class _MalformedError(ValueError):
    """Something in the file is not what a program has; the message says where."""


def parse_program(text: str) -> Program:
    """The program that `text` describes.

    Raises:
        ValueError: the text is no program; says where.
    """
    raw = _object(json.loads(text), "program")
    if raw.get("version") != VERSION:
        raise _MalformedError(f"version is {raw.get('version')!r}, this reader takes {VERSION}")
    program = Program(
        name=_string(raw.get("name"), "name"),
        dtype=_dtype(raw.get("dtype"), "dtype"),
        parameters=tuple(_strings(raw.get("parameters"), "parameters")),
        arguments=_mapping(raw.get("arguments"), "arguments", _argument),
        inputs=_mapping(raw.get("inputs"), "inputs", _input),
        dimensions=_mapping(raw.get("dimensions"), "dimensions", _dimension),
        leaves=_mapping(raw.get("leaves"), "leaves", _leaf),
        constants=_mapping(raw.get("constants"), "constants", _dtype),
        bindings=_mapping(raw.get("bindings"), "bindings", _binding),
        graph=_graph(raw.get("graph"), "graph"),
        graphs=_mapping(raw.get("graphs"), "graphs", _graph),
        mutations=_mapping(raw.get("mutations"), "mutations", _string),
        taps=tuple(_pair(item, f"taps[{number}]") for number, item in enumerate(_list(raw.get("taps"), "taps"))),
        is_training=_bool(raw.get("is_training"), "is_training"),
    )
    _check(program)
    return program


def _argument(raw: Any, where: str, depth: int = 0) -> Argument:
    if depth > _MAX_DEPTH:
        raise _MalformedError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if raw is None or isinstance(raw, bool | int | str):
        return raw
    if isinstance(raw, float) and math.isfinite(raw):
        return raw
    if isinstance(raw, list):
        return [_argument(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(raw)]
    if isinstance(raw, dict) and len(raw) == 1:
        ((kind, content),) = raw.items()
        return _tagged(kind, content, where, depth)
    raise _MalformedError(f"{where}: not an argument: {_shown(raw)}")


def _tagged(kind: str, content: Any, where: str, depth: int) -> Argument:
    match kind, content:
        case "ref", str():
            return Ref(_string(content, where))
        case "dtype", str():
            return Dtype(_dtype(content, where))
        case "graph", str():
            return GraphRef(_string(content, where))
        case "tuple", list():
            return tuple(_argument(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(content))
        case "dict", dict():
            return {key: _argument(item, f"{where}.{key}", depth + 1) for key, item in content.items()}
        case "complex", [real, imaginary]:
            parts = [_argument(part, where, depth + 1) for part in (real, imaginary)]
            if all(isinstance(part, float) for part in parts):
                return complex(*parts)
        case "float", "inf" | "-inf" | "nan":
            return float(content)
    raise _MalformedError(f"{where}: not an argument: {_shown({kind: content})}")


def _input(raw: Any, where: str) -> Input:
    spec = _object(raw, where)
    sizes = _list(spec.get("shape"), f"{where}.shape")
    return Input(
        shape=tuple(s if isinstance(s, str) and s else _int(s, f"{where}.shape", low=0) for s in sizes),
        dtype=_dtype(spec.get("dtype"), f"{where}.dtype"),
        low=_int(spec.get("low"), f"{where}.low"),
        high=_int(spec.get("high"), f"{where}.high"),
    )


def _dimension(raw: Any, where: str) -> Dimension:
    spec = _object(raw, where)
    high = spec.get("high")
    return Dimension(
        low=_int(spec.get("low"), f"{where}.low", low=0),
        high=None if high is None else _int(high, f"{where}.high", low=0),
    )


def _leaf(raw: Any, where: str) -> Leaf:
    spec = _object(raw, where)
    kind = spec.get("kind")
    if kind not in ("parameter", "buffer"):
        raise _MalformedError(f"{where}.kind: must be parameter or buffer, found {_shown(kind)}")
    sizes = _list(spec.get("shape"), f"{where}.shape")
    return Leaf(
        kind=kind,
        shape=tuple(_int(size, f"{where}.shape", low=0) for size in sizes),
        dtype=_dtype(spec.get("dtype"), f"{where}.dtype"),
        aliases=tuple(_strings(spec.get("aliases"), f"{where}.aliases")),
    )


def _binding(raw: Any, where: str) -> Binding:
    spec = _object(raw, where)
    source = spec.get("source")
    if source not in ("leaf", "constant", "input"):
        raise _MalformedError(f"{where}.source: must be leaf, constant or input, found {_shown(source)}")
    return Binding(source=source, name=_string(spec.get("name"), f"{where}.name"))


def _graph(raw: Any, where: str) -> Graph:
    spec = _object(raw, where)
    nodes = _list(spec.get("nodes"), f"{where}.nodes")
    return Graph(
        inputs=tuple(_strings(spec.get("inputs"), f"{where}.inputs")),
        nodes=tuple(_node(node, f"{where}.nodes[{number}]") for number, node in enumerate(nodes)),
        output=_argument(spec.get("output"), f"{where}.output"),
    )


def _node(raw: Any, where: str) -> Node:
    spec = _object(raw, where)
    module = spec.get("module")
    arguments = _argument(_list(spec.get("arguments"), f"{where}.arguments"), f"{where}.arguments")
    operation = _string(spec.get("operation"), f"{where}.operation")
    if not is_supported(operation):
        raise _MalformedError(f"{where}.operation: no operation {operation!r}")
    return Node(
        name=_string(spec.get("name"), f"{where}.name"),
        operation=operation,
        arguments=tuple(arguments),
        keywords=_mapping(spec.get("keywords"), f"{where}.keywords", _argument),
        module=_string(module, f"{where}.module") if module else "",
    )


def _check(program: Program) -> None:
    """Every name is defined before it is used, and bound to something that exists."""
    for where, graph in (("graph", program.graph), *((f"graphs.{key}", g) for key, g in program.graphs.items())):
        _check_graph(graph, where, graphs=frozenset(program.graphs))
    made = {*program.graph.inputs, *(node.name for node in program.graph.nodes)}
    unbound = sorted(set(program.graph.inputs) ^ program.bindings.keys())
    owners: dict[str, Mapping[str, Any]] = {
        "leaf": program.leaves,
        "constant": program.constants,
        "input": program.inputs,
    }
    lost = sorted(name for name, b in program.bindings.items() if b.name not in owners[b.source])
    lost += sorted(set(refs(dict(program.arguments))) ^ program.inputs.keys())
    lost += sorted(
        name for name in (*program.mutations.values(), *(value for _, value in program.taps)) if name not in made
    )
    lost += sorted(name for name in program.mutations if name not in program.leaves)
    sizes = {size for spec in program.inputs.values() for size in spec.shape if isinstance(size, str)}
    lost += sorted(sizes ^ program.dimensions.keys())
    if unbound or lost:
        raise _MalformedError(f"names that lead nowhere: {', '.join([*unbound, *lost][:10])}")


def _check_graph(graph: Graph, where: str, *, graphs: frozenset[str]) -> None:
    known = set(graph.inputs)
    if len(known) != len(graph.inputs):
        raise _MalformedError(f"{where}.inputs: a name appears twice")
    for number, node in enumerate(graph.nodes):
        missing = [name for name in node_refs(node) if name not in known]
        called = [argument.name for argument in node.arguments if isinstance(argument, GraphRef)]
        missing += [name for name in called if name not in graphs]
        if missing or node.name in known:
            raise _MalformedError(
                f"{where}.nodes[{number}]: " + (f"{missing[0]!r} is not defined" if missing else "its name is taken")
            )
        known.add(node.name)
    missing = [name for name in refs(graph.output) if name not in known]
    if missing:
        raise _MalformedError(f"{where}.output: {missing[0]!r} is not defined")


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _MalformedError(f"{where}: must be an object, found {_shown(raw)}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise _MalformedError(f"{where}: must be a list, found {_shown(raw)}")
    return raw


def _string(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise _MalformedError(f"{where}: must be a name, found {_shown(raw)}")
    return raw


def _strings(raw: Any, where: str) -> list[str]:
    return [_string(item, where) for item in _list(raw, where)]


def _pair(raw: Any, where: str) -> tuple[str, str]:
    items = _strings(raw, where)
    if len(items) != 2:
        raise _MalformedError(f"{where}: must be two names, found {_shown(raw)}")
    return items[0], items[1]


def _bool(raw: Any, where: str) -> bool:
    if not isinstance(raw, bool):
        raise _MalformedError(f"{where}: must be true or false, found {_shown(raw)}")
    return raw


def _int(raw: Any, where: str, *, low: int = -(2**63)) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw < 2**63:
        raise _MalformedError(f"{where}: must be a whole number, found {_shown(raw)}")
    return raw


def _dtype(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or raw not in DTYPES:
        raise _MalformedError(f"{where}: must be one of {', '.join(DTYPES)}, found {_shown(raw)}")
    return raw


def _mapping(raw: Any, where: str, read: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {_string(key, where): read(item, f"{where}.{key}") for key, item in _object(raw, where).items()}


def _shown(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
