"""Which way a checkpoint goes: by the rule table of its family, or by tracing its torch module.

Owns the choice and its reason. Knows no family and no framework: the trace road, which needs torch, is a dotted string
that is resolved only when a checkpoint takes it. The one decision: a choice that was left to the program is always
written down with its reason, so nobody has to guess why a model became what it is.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from converters.families.registry import TABLES, table_for
from converters.families.table import FamilyTable
from converters.mapping import DtypePolicy
from converters.operations import Shape
from converters.source import CONFIG_FILE, CheckpointSource
from converters.wrappers import canonical
from pipeline.errors import ConversionError, ParameterError
from pipeline.models.checkpoint import abstract_leaves
from pipeline.models.description import ModelDescription
from pipeline.models.module_file import MODULE_FILE
from pipeline.models.registry import describe_config

Via = Literal["auto", "family", "trace"]

ROADS: Mapping[str, str] = {"trace": "converters.trace.road:trace_checkpoint"}
"""`(directory, headers, *, dtype, project_root) -> TracedRoad`: `table` (an identity `FamilyTable`), `description` (a
`ModelDescription`), `warnings`, and `write(directory)`, which writes the program and its constants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Road:
    """How one checkpoint's tensors become the leaves of a Flax model."""

    name: Literal["family", "trace"]
    reason: str
    table: FamilyTable
    targets: Mapping[str, Shape]
    """Shape by leaf path of the Flax model."""
    target_dtypes: Mapping[str, str]
    """The model's own dtype by leaf path."""
    write: Callable[[Path], None]
    """Writes what describes the model beside `config.json`: nothing for a family, the program of a traced model."""
    is_second_choice: bool = False
    """True where the family has a table, but refused this config."""
    warnings: tuple[str, ...] = ()
    """What a person should know of the road itself."""


def choose_road(
    source: CheckpointSource, *, via: Via, dtype: DtypePolicy = "keep", project_root: Path | None = None
) -> Road:
    """The road of an opened checkpoint.

    `auto` takes the family where its table takes the config, and traces everything else.

    Args:
        source: the checkpoint.
        via: the road that is asked for.
        dtype: of the conversion; a module is traced in the dtype that its leaves will have.
        project_root: where the factory of a `module.json` is looked for first; the working directory when None.

    Raises:
        ArtifactError: the checkpoint has neither `config.json` nor `module.json`, or they are malformed.
        ConversionError: the road that was asked for does not lead anywhere, or none does; says why.
        ParameterError: `via` is `family`, and the config asks for something the Flax model does not have.
    """
    traced = partial(_traced, source, dtype=dtype, project_root=project_root)
    if (source.directory / MODULE_FILE).is_file():
        if via == "family":
            raise ConversionError(
                f"{source.directory}: has {MODULE_FILE}, a module of the user's own, which no family describes",
                hint="allowed: via trace, or auto",
            )
        return traced(reason=f"{MODULE_FILE} names a module of the user's own")
    config = source.config()
    names = [canonical(stored) for stored in source.headers]
    if via == "trace":
        return traced(reason="asked for")
    if via == "family":
        return family_road(config, names=names, reason="asked for")
    model_type = str(config.get("model_type", ""))
    if model_type not in TABLES:
        return traced(reason=f"no family has the model_type {model_type!r}")
    try:
        return family_road(config, names=names, reason=f"{CONFIG_FILE} names the family {model_type}")
    except (ConversionError, ParameterError) as refusal:
        return traced(reason=f"the family {model_type} refuses: {refusal.message}", is_second_choice=True)


def family_road(config: Mapping[str, Any], *, names: Collection[str], reason: str) -> Road:
    """The road by the family that `config` names.

    Args:
        config: of transformers.
        names: of the checkpoint's tensors, without wrapper prefixes; see `table_for`.
        reason: why this road.

    Raises:
        ConversionError: there is no such family, or the config does not fit it.
        ParameterError: the config asks for something the Flax model does not have.
    """
    return _road("family", reason=reason, table=table_for(config, names=names), description=describe_config(config))


def _traced(
    source: CheckpointSource,
    *,
    reason: str,
    dtype: DtypePolicy,
    project_root: Path | None,
    is_second_choice: bool = False,
) -> Road:
    module, _, function = ROADS["trace"].partition(":")
    trace = getattr(importlib.import_module(module), function)
    traced = trace(source.directory, source.headers, dtype=dtype, project_root=project_root)
    road = _road("trace", reason=reason, table=traced.table, description=traced.description)
    return replace(road, write=traced.write, warnings=tuple(traced.warnings), is_second_choice=is_second_choice)


def _road(name: Literal["family", "trace"], *, reason: str, table: FamilyTable, description: ModelDescription) -> Road:
    leaves = abstract_leaves(description)
    return Road(
        name=name,
        reason=reason,
        table=table,
        targets={path: tuple(leaf.shape) for path, leaf in leaves.items()},
        target_dtypes={path: str(leaf.dtype) for path, leaf in leaves.items()},
        write=lambda directory: None,
    )
