"""The resolved flow as YAML: what a run is remembered by.

Owns the text. Pure. The one decision: the text is itself a flow, with every parameter of every stage written out and
nothing left to resolve, so it can be validated, compared and run again as it is.
"""

import io
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from pipeline.plan.graph import Flow
from pipeline.plan.stage import Hop, ResolvedStage
from pipeline.spec.scalar import canonical_text
from pipeline.stages.reference import OutputReference

_MANY_COLUMNS = 4096


def resolved_text(flow: Flow) -> str:
    """The flow with its parameters put in and every default written out."""
    spec = flow.spec
    document: dict[str, Any] = {"flow": spec.name}
    if spec.description:
        document["description"] = spec.description
    document["stages"] = {stage.name: _stage(stage) for stage in flow.stages}
    header = [f"# Resolved from {spec.shown_file}"]
    for param in spec.declarations.values():
        origin = "given with -P" if param.overridden else "its default"
        header.append(f"# params.{param.name} = {_one_line(canonical_text(param.value))} ({origin})")
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = _MANY_COLUMNS
    yaml.allow_unicode = True
    body = io.StringIO()
    yaml.dump(document, body)
    return "\n".join(header) + "\n" + body.getvalue()


def _stage(stage: ResolvedStage) -> dict[str, Any]:
    made: dict[str, Any] = {"uses": stage.kind.name}
    if stage.description:
        made["description"] = stage.description
    made["with"] = {name: _escaped(getattr(stage.parameters, name)) for name in stage.display}
    made["resources"] = _resources(stage)
    if stage.gates:
        made["gates"] = {gate.metric: f"{gate.comparison} {gate.limit!r}" for gate in stage.gates}
    made["retry"] = {"max_attempts": stage.retry.max_attempts, "backoff_seconds": stage.retry.backoff_seconds}
    if stage.timeout_seconds is not None:
        made["timeout_seconds"] = stage.timeout_seconds
    if stage.fallback:
        made["fallback"] = [_hop(hop) for hop in stage.fallback]
    return made


def _hop(hop: Hop) -> dict[str, Any]:
    made: dict[str, Any] = {"on": [one.value for one in hop.on]}
    if hop.stage is None:
        return made | {"keep": "champion"}
    after = hop.stage.parameters
    if "with" in hop.changes:
        made["with"] = {name: _escaped(getattr(after, name)) for name in hop.changes["with"]}
    if "resources" in hop.changes:
        made["resources"] = dict(hop.changes["resources"])
    # Also where it is that of the stage, or none: it may be all that the hop says.
    if hop.stage.timeout_seconds is not None or "limits" in hop.changes:
        made["timeout_seconds"] = hop.stage.timeout_seconds
    return made


def _resources(stage: ResolvedStage) -> dict[str, Any]:
    given = stage.resources
    workers: Any = given.workers if given.min_workers is None else {"min": given.min_workers, "max": given.workers}
    made: dict[str, Any] = {"workers": workers, "cpus": given.cpus, "gpus": given.gpus}
    if given.memory_bytes:
        made["memory"] = str(given.memory_bytes)
    if given.labels:
        made["labels"] = dict(given.labels)
    return made


def _escaped(value: object) -> Any:
    """A parameter as the flow would write it; `${` that is plain text becomes `$${`."""
    if isinstance(value, OutputReference):
        return str(value)
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, BaseModel):
        return {name: _escaped(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)
