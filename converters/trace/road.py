"""The trace road of a conversion: a checkpoint without a family becomes a program and an identity table.

Owns what the conversion needs in place of a family: the program, its constants, and the rules from torch names to the
same names. Knows nothing of writing. The one decision: parameters keep their torch names and layouts, so the way there
and the way back are both the identity.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.families.table import FamilyTable, Tie
from converters.mapping import DtypePolicy
from converters.rules import Rule
from converters.source import TensorHeader
from converters.trace.export import trace_module
from converters.trace.model import traceable_model
from converters.trace.taps import blocks
from converters.wrappers import canonical_names
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
    model = traceable_model(directory, dtypes=dtypes, project_root=project_root)
    trace = trace_module(
        model.module, kwargs=model.examples.inputs, dynamic=model.examples.dynamic, names=tuple(stored)
    )
    return TracedRoad(
        program=trace.program,
        constants=trace.constants,
        table=identity_table(trace.program, paths=blocks(model.module), names=frozenset(stored)),
        warnings=_warnings(trace.program, dynamic=model.examples.dynamic),
    )


def identity_table(program: Program, *, paths: tuple[str, ...], names: frozenset[str]) -> FamilyTable:
    """Every leaf from the tensor of the same name.

    Args:
        program: whose leaves are filled.
        paths: modules whose outputs are compared.
        names: canonical names that the checkpoint has.
    """
    templates = dict.fromkeys(_template(name) for name in program.leaves)
    ran = {path for path, _ in program.taps}
    known = {name for leaf, spec in program.leaves.items() for name in (leaf, *spec.aliases)}
    return FamilyTable(
        family=TRACED,
        facts={"module": program.name, "dtype": program.dtype, "num_operations": len(list(program.nodes()))},
        rules=tuple(Rule.one(template, template) for template in templates),
        ties=tuple(Tie(tensor=alias, same_as=name) for name, leaf in program.leaves.items() for alias in leaf.aliases),
        carried=tuple(sorted(name for name in names - known if name.rpartition(".")[2] == "num_batches_tracked")),
        blocks=tuple((path, path) for path in paths if path in ran),
    )


def _warnings(program: Program, *, dynamic: Mapping[str, Mapping[int, str]]) -> tuple[str, ...]:
    """Sizes that were asked to vary and that the module fixes."""
    return tuple(
        f"input {name}: the module fixes {size} at {program.inputs[name].shape[axis]}"
        for name, axes in dynamic.items()
        for axis, size in axes.items()
        if isinstance(program.inputs[name].shape[axis], int)
    )


def _template(name: str) -> str:
    """The name with its numbers as fields: one rule serves all layers."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return ".".join(
        "{" + next(letters) + "}" if re.fullmatch(r"0|[1-9][0-9]*", part) else part for part in name.split(".")
    )
