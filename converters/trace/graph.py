"""An exported graph becomes a program.

Owns the translation of FX nodes to nodes of a program, and of export's signature to leaves, constants and inputs. Knows
nothing of how a module was exported. The one decision: what does not reach an output, a written buffer or a tap is left
out, so assertions and the arithmetic behind them vanish without a list of their names.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from converters.torch_file_reader import to_numpy
from converters.trace.recurrent import STANDS_FOR
from converters.trace.signature import read_signature
from converters.trace.taps import TAP_OPERATION
from pipeline.errors import ConversionError
from pipeline.models.traced.dtypes import SENTINELS
from pipeline.models.traced.program import (
    Argument,
    Binding,
    Dtype,
    Graph,
    GraphRef,
    Leaf,
    Node,
    Program,
    Ref,
    node_refs,
    refs,
)

_PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")
"""Where and how torch keeps a tensor; has no meaning in JAX."""
_DATA_DEPENDENT = " (its size depends on values)"
_INT32 = np.iinfo(np.int32)


def graph_operations(exported: ExportedProgram) -> Iterator[tuple[str, str]]:
    """Operation and module path of every call whose result is used, nested graphs included."""
    for graph_module in exported.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in _live(graph_module.graph):
                if node.op != "call_function" or operation_name(node.target) == TAP_OPERATION:
                    continue
                name = operation_name(node.target)
                # A size that is known only when the values are has no place in a compiled program.
                yield f"{name}{_DATA_DEPENDENT}" if node.meta.get("unbacked_bindings") else name, module_path(node)


def program_of(
    exported: ExportedProgram,
    *,
    module: torch.nn.Module,
    dynamic: Mapping[str, Mapping[int, str]],
    names: frozenset[str],
) -> tuple[Program, dict[str, np.ndarray[Any, Any]]]:
    """The program of an exported graph whose operations are all known, and its constants.

    Buffers that the graph writes get their new values only where a checkpoint holds them; what a module keeps between
    calls for itself (a cache in a buffer that is not saved) starts anew in each.

    Raises:
        ConversionError: a constant holds integers that 32 bit cannot; lists every such constant.
    """
    signature = read_signature(exported, dynamic=dynamic, module=module)
    owner = _owners(module, names)
    graphs: dict[str, Graph] = {}
    translated = _Translation(exported.graph_module, graphs)
    graph, taps = translated.main(exported)
    bindings, constants = _bound(exported, module=module, owner=owner, paths=signature.paths)
    used = _used(graph)
    bindings = {name: binding for name, binding in bindings.items() if name in used or binding.source == "input"}
    kept = {binding.name for binding in bindings.values()}
    arrays = _arrays({name: value for name, value in constants.items() if name in kept})
    leaves = _leaves(module, owner, used=kept)
    mutations = {
        owner[str(spec.target)]: str(spec.arg.name)
        for spec in exported.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION and str(spec.target) in owner
    }
    program = Program(
        name=type(module).__name__,
        dtype=_model_dtype(leaves),
        parameters=signature.parameters,
        arguments=signature.arguments,
        inputs=signature.inputs,
        dimensions=signature.dimensions,
        leaves=leaves,
        constants={name: str(value.dtype) for name, value in arrays.items()},
        bindings=bindings,
        graph=Graph(inputs=tuple(bindings), nodes=graph.nodes, output=graph.output),
        graphs=graphs,
        mutations=mutations,
        taps=tuple(taps.items()),
        is_training=module.training,
    )
    return program, arrays


def _bound(
    exported: ExportedProgram, *, module: torch.nn.Module, owner: Mapping[str, str], paths: Mapping[str, str]
) -> tuple[dict[str, Binding], dict[str, torch.Tensor]]:
    """Where each placeholder's value comes from, and the tensors that neither a checkpoint nor a caller gives."""
    bindings: dict[str, Binding] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        name, target = spec.arg.name, str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            if name in paths:
                bindings[name] = Binding(source="input", name=paths[name])
        elif target in owner:
            bindings[name] = Binding(source="leaf", name=owner[target])
        else:
            constants[target] = _constant(exported, module, target)
            bindings[name] = Binding(source="constant", name=target)
    return bindings, constants


class _Translation:
    """One walk over an FX graph and the graphs it calls."""

    def __init__(self, owner: torch.fx.GraphModule, graphs: dict[str, Graph], *, path: str = "") -> None:
        self.owner = owner
        self.graphs = graphs
        self.path = path
        """Before the names of the graphs that this one calls: torch numbers them anew inside each."""
        self.same: dict[str, str] = {}
        """A mark's name to the value it marked."""
        self.taps: dict[str, str] = {}

    def main(self, exported: ExportedProgram) -> tuple[Graph, dict[str, str]]:
        """The main graph, its output in the tree that torch returns, and the taps."""
        nodes = self._nodes(exported.graph)
        (output,) = (node for node in exported.graph.nodes if node.op == "output")
        values = [self.argument(item) for item in output.args[0]]
        kinds = [spec.kind for spec in exported.graph_signature.output_specs]
        users = [value for value, kind in zip(values, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
        return Graph(inputs=(), nodes=nodes, output=_tree(exported.call_spec.out_spec, users)), self.taps

    def nested(self, target: str) -> GraphRef:
        """A graph that this one calls."""
        name = f"{self.path}{target}"
        if name not in self.graphs:
            inner = _Translation(self.owner.get_submodule(target), self.graphs, path=f"{name}.")
            graph = inner.owner.graph
            nodes = inner._nodes(graph)
            (output,) = (node for node in graph.nodes if node.op == "output")
            inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
            self.graphs[name] = Graph(inputs=inputs, nodes=nodes, output=inner.argument(output.args[0]))
        return GraphRef(name)

    def _nodes(self, graph: torch.fx.Graph) -> tuple[Node, ...]:
        nodes = []
        for node in _live(graph):
            if node.op != "call_function":
                continue
            name = operation_name(node.target)
            if name == TAP_OPERATION:
                value = self.argument(node.args[0])
                self.same[node.name] = value.name
                self.taps[str(node.args[1])] = value.name
                continue
            nodes.append(
                Node(
                    name=node.name,
                    operation=name,
                    arguments=tuple(self.argument(item) for item in node.args),
                    keywords={key: self.argument(v) for key, v in node.kwargs.items() if key not in _PLACEMENT},
                    module=module_path(node),
                )
            )
        return tuple(nodes)

    def argument(self, value: Any) -> Argument:
        """An FX argument as a program's."""
        if isinstance(value, torch.fx.Node):
            if value.op == "get_attr":
                return self.nested(str(value.target))
            return Ref(self.same.get(value.name, value.name))
        if isinstance(value, torch.dtype):
            return Dtype(dtype_name(value))
        if isinstance(value, list | tuple):
            return [self.argument(item) for item in value]
        if isinstance(value, dict):
            return {str(key): self.argument(item) for key, item in value.items()}
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value.node.guard_int("", 0) if isinstance(value, torch.SymInt) else float(value)
        return value


def operation_name(target: Any) -> str:
    """`aten.add.Tensor` for an overload, `sym.add` for Python arithmetic, `higher_order.cond` for control flow."""
    if isinstance(target, torch._ops.OpOverload):
        return STANDS_FOR.get(str(target), str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    name = str(getattr(target, "__name__", target)).strip("_")
    return f"sym.{name.removeprefix('sym_')}"


def module_path(node: torch.fx.Node) -> str:
    """Path of the innermost torch module that made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.partition("@")[0].removeprefix("L['self'].").removeprefix("L['self']")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _live(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that reach an output or a tap, in order."""
    alive: set[torch.fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        is_mark = node.op == "call_function" and operation_name(node.target) == TAP_OPERATION
        if node.op in ("output", "placeholder") or is_mark or node in alive:
            alive.add(node)
            alive.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in alive]


def _tree(spec: Any, values: list[Argument]) -> Argument:
    """The output tree; torch's named outputs become dicts, and their empty fields are left out by torch itself."""
    remaining = iter(values)

    def build(node: Any) -> Argument:
        if node.is_leaf():
            return next(remaining)
        children = [build(child) for child in node.children()]
        if node.type is tuple:
            return tuple(children)
        if node.type is list:
            return children
        keys = _keys(node)
        if keys is None:
            return tuple(children)
        return {str(key): child for key, child in zip(keys, children, strict=True)}

    return build(spec)


def _keys(spec: Any) -> list[Any] | None:
    fields = getattr(spec.type, "_fields", None) or getattr(spec.context, "_fields", None)
    if fields is not None:
        return list(fields)
    context = spec.context[1] if spec.type is defaultdict else spec.context
    while isinstance(context, list | tuple) and context and isinstance(context[0], list | tuple):
        context = context[0]
    if isinstance(context, list | tuple) and len(context) == spec.num_children:
        return list(context)
    return None


def _used(graph: Graph) -> set[str]:
    used = set(refs(graph.output))
    for node in graph.nodes:
        used.update(node_refs(node))
    return used


def _owners(module: torch.nn.Module, names: frozenset[str]) -> dict[str, str]:
    """The name that carries a parameter or persistent buffer, by each of its names.

    Of several names of one tensor, the first that the checkpoint has; torch's first where it has none.
    """
    groups: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(name)
    chosen = {}
    for group in groups.values():
        carrier = next((name for name in group if name in names), group[0])
        chosen.update(dict.fromkeys(group, carrier))
    return chosen


def _leaves(module: torch.nn.Module, owner: Mapping[str, str], *, used: set[str]) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or owner[name] != name:
            continue
        # A counter that nothing computes with stays in the checkpoint's own company.
        if not value.is_floating_point() and name not in used:
            continue
        leaves[name] = Leaf(
            kind="parameter" if isinstance(value, torch.nn.Parameter) else "buffer",
            shape=tuple(value.shape),
            dtype=dtype_name(value.dtype),
            aliases=tuple(other for other, carrier in owner.items() if carrier == name and other != name),
        )
    return leaves


def _model_dtype(leaves: Mapping[str, Leaf]) -> str:
    sizes: dict[str, int] = {}
    for leaf in leaves.values():
        if "float" in leaf.dtype:
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + int(np.prod(leaf.shape))
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else "float32"


def _constant(exported: ExportedProgram, module: torch.nn.Module, target: str) -> torch.Tensor:
    if target in exported.constants:
        return exported.constants[target]
    if target in exported.state_dict:
        return exported.state_dict[target]
    return dict(module.named_buffers(remove_duplicate=False))[target]


def _arrays(constants: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """In 32 bit.

    Raises:
        ConversionError: integers do not fit; sentinels at the ends of int64 become the ends of int32.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    complaints = []
    for name, value in constants.items():
        array = to_numpy(value.cpu())
        if array.dtype == np.int64:
            wide = array[~np.isin(array, SENTINELS)]
            if wide.size and (wide.min() < _INT32.min or wide.max() > _INT32.max):
                complaints.append(f"  {name}: from {wide.min()} to {wide.max()}")
            array = np.clip(array, _INT32.min, _INT32.max).astype(np.int32)
        arrays[name] = array.astype(
            {"float64": np.float32, "complex128": np.complex64}.get(str(array.dtype), array.dtype)
        )
    if complaints:
        raise ConversionError("constants with integers that 32 bit cannot hold:\n" + "\n".join(complaints))
    return arrays
