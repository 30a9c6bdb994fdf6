"""A torch module and example inputs become a program.

Owns the call of `torch.export` and how far its graph is decomposed. Knows nothing of checkpoints. The one decision:
the graph is made functional but stays as coarse as the operations registry allows, because XLA fuses the plain forms
(`linear`, `layer_norm`, `softmax`) best; only what the registry lacks is decomposed, and what is then still unknown is
listed in full before anything runs.
"""

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from converters.trace.graph import graph_operations, program_of
from converters.trace.recurrent import whole_layers
from converters.trace.taps import marked
from pipeline.errors import ConversionError
from pipeline.models.traced.operations import is_supported
from pipeline.models.traced.program import Program

_MAX_ROUNDS = 4
"""Decomposing may bring in operations that need decomposing; the deepest chain seen needs two rounds."""

DynamicSizes = Mapping[str, Mapping[int, str]]
"""Names of the dimensions that may vary, by input and axis; an input inside a list or dict has a dotted path."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a torch module became."""

    program: Program
    constants: Mapping[str, np.ndarray[Any, Any]]
    """Tensors of the graph that no checkpoint holds."""


def trace_module(
    module: torch.nn.Module,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic: DynamicSizes | None = None,
    names: Sequence[str] = (),
) -> Trace:
    """Export `module` as it stands (training or evaluation mode) and make it a program.

    Args:
        module: any module that `torch.export` accepts.
        args: example arguments; sizes that shall vary must be 2 or more.
        kwargs: example keyword arguments.
        dynamic: which sizes shall vary. A size that the module fixes stays fixed; the program's inputs say so.
        names: names that the checkpoint has; decides which of several names of a tied parameter is used.

    Raises:
        ConversionError: `torch.export` refuses the module, or its graph has operations that JAX has no counterpart
            for; lists all of them with their modules.
    """
    exported = export_module(module, args=args, kwargs=kwargs or {}, dynamic=dynamic or {})
    return trace_exported(exported, module=module, dynamic=dynamic or {}, names=names)


def trace_exported(
    exported: ExportedProgram,
    *,
    module: torch.nn.Module,
    dynamic: DynamicSizes,
    names: Sequence[str] = (),
) -> Trace:
    """As `trace_module`, from what `export_module` made of `module`.

    Raises:
        ConversionError: its graph has operations that JAX has no counterpart for; lists all of them.
    """
    lowered = lower(exported)
    unsupported = unsupported_operations(lowered)
    if unsupported:
        raise ConversionError(
            f"{type(module).__name__}: {len(unsupported)} operations cannot be traced to JAX:\n"
            + "\n".join(f"  {line}" for line in unsupported_lines(unsupported)),
            hint="write the module without them, or add them to pipeline/models/traced/operations_*.py",
        )
    program, constants = program_of(lowered, module=module, dynamic=dynamic, names=frozenset(names))
    return Trace(program=program, constants=constants)


def export_module(
    module: torch.nn.Module, *, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: DynamicSizes
) -> ExportedProgram:
    """`torch.export` with the named sizes left open.

    Raises:
        ConversionError: it refuses the module; its own words are in the message.
    """
    shapes = _dynamic_shapes(module, args=args, kwargs=kwargs, dynamic=dynamic) if dynamic else None
    complaints: list[str] = []
    for strict in (False, True):
        try:
            with nullcontext() if strict else marked(module), whole_layers(), _quiet(), torch.no_grad():
                return torch.export.export(module, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # torch.export raises whatever the module's own code raises
            complaints.append(f"  strict={strict}: {type(error).__name__}: {_first_lines(error)}")
            if strict:
                raise ConversionError(
                    f"{type(module).__name__}: torch.export refuses it:\n" + "\n".join(complaints),
                    hint="control flow that depends on values cannot be traced; see torch.export's documentation",
                ) from error
    raise AssertionError("the strict road either returns or raises")


def lower(exported: ExportedProgram) -> ExportedProgram:
    """The functional graph, decomposed only where the registry has no operation.

    Raises:
        ConversionError: torch's own decompositions fail; its words are in the message.
    """
    if _is_plain(exported):
        return exported  # making it functional again would take as long as the export did
    try:
        return _lowered(exported)
    except Exception as error:  # a fault inside torch's functionalization may raise anything
        try:
            return exported.run_decompositions()
        except Exception as second:
            raise ConversionError(
                f"torch cannot make the exported graph functional: {type(error).__name__}: {_first_lines(error)}; "
                f"with all decompositions: {type(second).__name__}: {_first_lines(second)}"
            ) from error


def _is_plain(exported: ExportedProgram) -> bool:
    """Whether the graph, as exported, writes to nothing and has only operations of the registry."""
    for graph_module in exported.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in graph_module.graph.nodes:
                if node.op == "call_function" and _writes(node):
                    return False
    return all(is_supported(name) for name, _ in graph_operations(exported))


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return schema is not None
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    # Running statistics of a batch are written without the schema saying so.
    return given.get("running_mean") is not None and any(given.get(name) for name in ("training", "use_input_stats"))


def _lowered(exported: ExportedProgram) -> ExportedProgram:
    lowered = exported.run_decompositions({})
    table = torch.export.default_decompositions()
    known = {str(operation): operation for operation in table}
    for _ in range(_MAX_ROUNDS):
        wanted = {name for name, _ in graph_operations(lowered) if not is_supported(name) and name in known}
        if not wanted:
            break
        lowered = lowered.run_decompositions({known[name]: table[known[name]] for name in sorted(wanted)})
    return lowered


def unsupported_operations(exported: ExportedProgram) -> dict[str, Counter[str]]:
    """By operation, how often each module calls it."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, path in graph_operations(exported):
        if not is_supported(name):
            found[name][path] += 1
    return dict(found)


def unsupported_lines(unsupported: Mapping[str, Counter[str]]) -> list[str]:
    """One line an operation, the most frequent first."""
    lines = []
    for name, paths in sorted(unsupported.items(), key=lambda item: (-item[1].total(), item[0])):
        shown = ", ".join(path or "the model itself" for path, _ in paths.most_common(3))
        more = f" and {len(paths) - 3} more modules" if len(paths) > 3 else ""
        lines.append(f"{name} x{paths.total()} in {shown}{more}")
    return lines


def _dynamic_shapes(
    module: torch.nn.Module, *, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: DynamicSizes
) -> dict[str, Any]:
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    parameters = inspect.signature(module.forward).parameters
    shapes: dict[str, Any] = {}
    for name, value in bound.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            shapes[name] = {key: _open(item, key, dynamic) for key, item in value.items()}
        else:
            shapes[name] = _open(value, name, dynamic)
    return shapes


def _open(value: Any, path: str, dynamic: DynamicSizes) -> Any:
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(dynamic.get(path, ()), Dim.AUTO) or None
    if isinstance(value, list | tuple):
        return type(value)(_open(item, f"{path}.{number}", dynamic) for number, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _open(item, f"{path}.{key}", dynamic) for key, item in value.items()}
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about its own deprecations and about weights that recurrent modules keep twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="The tensor attributes? .*assigned during export")
        yield


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500]
