"""The trace road of a conversion: a checkpoint without a family becomes a program and an identity table.

Owns what the conversion needs in place of a family: the program, its constants, and the rules from the checkpoint's
names to the module's. Knows nothing of writing. The one decision: parameters keep their torch layouts, so the way there
and the way back change names at most.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from converters.families.table import FamilyTable, Tie
from converters.mapping import DtypePolicy
from converters.rules import Rule
from converters.source import TensorHeader
from converters.trace.export import DynamicSizes, export_module, trace_exported
from converters.trace.model import TraceableModel, traceable_model
from converters.trace.names import ignored_names, module_names
from converters.trace.taps import blocks
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.module_file import BATCH
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.program import Program
from pipeline.models.traced.program_file import write_program

TRACED = "traced"
"""What the manifest calls the family of a traced model."""


@dataclass(frozen=True, kw_only=True)
class TracedRoad:
    """What the conversion of a checkpoint by tracing needs."""

    program: Program
    table: FamilyTable
    constants: Mapping[str, np.ndarray[Any, Any]]
    warnings: tuple[str, ...] = ()
    """What a person should know, for the manifest."""

    @property
    def description(self) -> TracedModel:
        """The model without weights; `abstract_leaves(road.description)` are the conversion's targets."""
        return TracedModel(program=self.program, constants=self.constants)

    def write(self, directory: Path) -> None:
        """Write `program.json` and `constants.safetensors` into a model directory."""
        write_program(directory, program=self.program, constants=self.constants)


def trace_checkpoint(
    directory: Path,
    headers: Mapping[str, TensorHeader],
    *,
    dtype: DtypePolicy = "keep",
    project_root: Path | None = None,
) -> TracedRoad:
    """Build the torch module of a checkpoint without its weights, and trace it.

    Args:
        directory: of the checkpoint, with `module.json` or a transformers `config.json`.
        headers: its tensors by stored name.
        dtype: the policy of the conversion; the module is traced in the dtype that its leaves will have.
        project_root: where the factory of `module.json` is looked for first; the working directory by default.

    Raises:
        ArtifactError: neither file is there, or it is malformed.
        ConversionError: the module cannot be made or exported, or uses operations without a counterpart in JAX; lists
            all of them.
    """
    stored = canonical_names(headers)
    dtypes = [headers[name].dtype for name in stored.values()] if dtype == "keep" else [dtype]
    make = partial(traceable_model, directory, dtypes=dtypes, project_root=project_root)
    model = make()
    names = module_names(model.module, stored)
    model, exported, dynamic = _exported(model, again=make)
    trace = trace_exported(exported, module=model.module, dynamic=dynamic, names=tuple(names.values()))
    return TracedRoad(
        program=trace.program,
        constants=trace.constants,
        table=table_of(trace.program, module=model.module, names=names),
        warnings=_warnings(trace.program, dynamic=model.examples.dynamic),
    )


def _exported(
    model: TraceableModel, *, again: Callable[[], TraceableModel]
) -> tuple[TraceableModel, ExportedProgram, DynamicSizes]:
    """The module, its graph, and the sizes left open: all that were asked for, else the batch, else none.

    Raises:
        ConversionError: `torch.export` refuses the module even with fixed sizes; in its words for the most open form.
    """
    asked = model.examples.dynamic
    batch = {name: {axis: size for axis, size in axes.items() if size == BATCH} for name, axes in asked.items()}
    forms = [asked, *([batch] if batch != asked and any(batch.values()) else []), *([{}] if asked else [])]
    first: ConversionError | None = None
    for dynamic in forms:
        if first is not None:
            model = again()  # a module may keep what it saw when an export failed half way
        try:
            inputs = model.examples.inputs
            return model, export_module(model.module, args=(), kwargs=inputs, dynamic=dynamic), dynamic
        except ConversionError as error:
            first = first or error
    assert first is not None  # there is always one form
    raise first


def table_of(program: Program, *, module: torch.nn.Module, names: Mapping[str, str]) -> FamilyTable:
    """Every leaf from its tensor, unchanged.

    Args:
        program: whose leaves are filled.
        module: that it was traced from.
        names: the module's name by the checkpoint's.
    """
    stored_by_name = {name: stored for stored, name in names.items()}
    known = {name for leaf, spec in program.leaves.items() for name in (leaf, *spec.aliases)}
    ran = {path for path, _ in program.taps}
    state = module.state_dict()
    return FamilyTable(
        family=TRACED,
        facts={"module": program.name, "dtype": program.dtype, "num_operations": len(list(program.nodes()))},
        rules=tuple(dict.fromkeys(_rule(stored_by_name.get(name, name), name) for name in program.leaves)),
        ignored=ignored_names(module, names),
        ties=tuple(
            Tie(tensor=stored_by_name.get(alias, alias), same_as=stored_by_name.get(name, name))
            for name, leaf in program.leaves.items()
            for alias in leaf.aliases
        ),
        carried=tuple(sorted(stored for stored, name in names.items() if name in state and name not in known)),
        blocks=tuple((path, path) for path in blocks(module) if path in ran),
    )


def _rule(stored: str, name: str) -> Rule:
    """One rule serves all layers: numbers that both names share, in the same order, become fields."""
    parts = [re.split(r"(?<=\.)(0|[1-9][0-9]*)(?=\.)", f".{text}.") for text in (stored, name)]
    if parts[0][1::2] != parts[1][1::2]:
        return Rule.one(stored, name)
    templates = []
    for pieces in parts:
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        joined = "".join(piece if at % 2 == 0 else "{" + next(letters) + "}" for at, piece in enumerate(pieces))
        templates.append(joined[1:-1])
    return Rule.one(templates[0], templates[1])


def _warnings(program: Program, *, dynamic: Mapping[str, Mapping[int, str]]) -> tuple[str, ...]:
    """Sizes that were asked to vary and that the module fixes."""
    return tuple(
        f"input {name}: the module fixes {size} at {program.inputs[name].shape[axis]}"
        for name, axes in dynamic.items()
        for axis, size in axes.items()
        if isinstance(program.inputs[name].shape[axis], int)
    )
