"""The text of a program: JSON that is data alone.

Owns the encoding of programs. Knows nothing of files. The one decision: everything that JSON lacks (references, dtypes,
tuples, infinities, complex numbers) is an object with one key, so numbers, texts and lists mean themselves.
"""

import json
import math
from typing import Any

from pipeline.models.traced.program import VERSION, Argument, Dtype, Graph, GraphRef, Program, Ref


def program_text(program: Program) -> str:
    """The JSON of a program; the same program always gives the same text."""
    return json.dumps(_encoded_program(program), indent=1, allow_nan=False) + "\n"


def _encoded_program(program: Program) -> dict[str, Any]:
    return {
        "version": VERSION,
        "name": program.name,
        "dtype": program.dtype,
        "is_training": program.is_training,
        "parameters": list(program.parameters),
        "arguments": {name: _encoded(value) for name, value in program.arguments.items()},
        "inputs": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype, "low": spec.low, "high": spec.high}
            for name, spec in program.inputs.items()
        },
        "dimensions": {name: {"low": spec.low, "high": spec.high} for name, spec in program.dimensions.items()},
        "leaves": {
            name: {"kind": leaf.kind, "shape": list(leaf.shape), "dtype": leaf.dtype, "aliases": list(leaf.aliases)}
            for name, leaf in program.leaves.items()
        },
        "constants": dict(program.constants),
        "bindings": {name: {"source": b.source, "name": b.name} for name, b in program.bindings.items()},
        "graph": _encoded_graph(program.graph),
        "graphs": {name: _encoded_graph(graph) for name, graph in program.graphs.items()},
        "mutations": dict(program.mutations),
        "taps": [list(pair) for pair in program.taps],
    }


def _encoded_graph(graph: Graph) -> dict[str, Any]:
    return {
        "inputs": list(graph.inputs),
        "nodes": [
            {
                "name": node.name,
                "operation": node.operation,
                "arguments": [_encoded(item) for item in node.arguments],
                "keywords": {key: _encoded(item) for key, item in node.keywords.items()},
                "module": node.module,
            }
            for node in graph.nodes
        ],
        "output": _encoded(graph.output),
    }


def _encoded(value: Argument) -> Any:
    match value:
        case Ref(name):
            return {"ref": name}
        case Dtype(name):
            return {"dtype": name}
        case GraphRef(name):
            return {"graph": name}
        case list():
            return [_encoded(item) for item in value]
        case tuple():
            return {"tuple": [_encoded(item) for item in value]}
        case dict():
            return {"dict": {key: _encoded(item) for key, item in value.items()}}
        case complex():
            return {"complex": [_encoded(value.real), _encoded(value.imag)]}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
    return value
