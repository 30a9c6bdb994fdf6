"""The JSON Schema of a flow file, for editors and `pipeline schema`.

Owns the translation of the grammar's tables and the kinds' models. Pure. The one decision: the schema is generated,
never written; a number, a boolean or a choice may always be a `${params.NAME}` too, because the loader takes one.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pipeline.spec.gate import CONDITION_FORM
from pipeline.spec.grammar import (
    FALLBACK_KEYS,
    FLOW_KEYS,
    MEMORY_PATTERN,
    NAME_PATTERN,
    STAGE_KEYS,
    FallbackLimits,
    ResourcesSpec,
    RetryPolicy,
)
from pipeline.spec.params import KEYS as PARAMETER_KEYS
from pipeline.spec.params import TYPES
from pipeline.stages.registry import KINDS, StageKind

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PARAM_PATTERN = r"^\$\{params\.[A-Za-z][A-Za-z0-9_-]*\}$"
_TEMPLATE_PATTERN = r"\$\{params\.[A-Za-z][A-Za-z0-9_-]*\}"
_CONDITION_PATTERN = (
    r"^\s*(<=|>=|==|<|>)\s*([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\$\{params\.[A-Za-z][A-Za-z0-9_-]*\})\s*%?\s*$"
)
_OUTPUT_PREFIX = r"^\$\{stages"
_DROPPED = frozenset({"title", "identity", "source_file"})
_PARAM: Mapping[str, Any] = {"$ref": "#/$defs/param"}
_TEMPLATE: Mapping[str, Any] = {"$ref": "#/$defs/template"}


def flow_schema() -> dict[str, Any]:
    """Draft 2020-12 schema of a whole flow file; `with`, and the metrics of `gates`, follow from `uses`."""
    return {
        "$schema": DIALECT,
        "title": "flow",
        "description": "A flow: stages, their parameters and the references that connect them.",
        "type": "object",
        "additionalProperties": False,
        "required": ["flow", "stages"],
        "properties": {
            "flow": {"description": FLOW_KEYS["flow"], "type": "string", "pattern": NAME_PATTERN},
            "description": {"description": FLOW_KEYS["description"], "type": "string"},
            "params": {
                "description": FLOW_KEYS["params"],
                "type": "object",
                "propertyNames": {"pattern": NAME_PATTERN},
                "additionalProperties": {"$ref": "#/$defs/parameter"},
            },
            "stages": {
                "description": FLOW_KEYS["stages"],
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": NAME_PATTERN},
                "additionalProperties": {"$ref": "#/$defs/stage"},
            },
        },
        "$defs": {
            "param": {"description": "${params.NAME}", "type": "string", "pattern": _PARAM_PATTERN},
            "template": {"description": "text with ${params.NAME}", "type": "string", "pattern": _TEMPLATE_PATTERN},
            "condition": {"description": CONDITION_FORM, "type": "string", "pattern": _CONDITION_PATTERN},
            "parameter": _parameter(),
            "stage": _stage(),
        }
        | {kind.name: _model(kind.parameters) for kind in KINDS.values()},
    }


def schema_text() -> str:
    """The schema as it is kept in `configs/flow.schema.json`."""
    return json.dumps(flow_schema(), indent=2, ensure_ascii=False) + "\n"


def _parameter() -> dict[str, Any]:
    scalar = {"type": ["string", "number", "boolean"]}
    values: dict[str, Any] = {
        "type": {"enum": list(TYPES)},
        "default": scalar,
        "minimum": {"type": "number"},
        "maximum": {"type": "number"},
        "choices": {"type": "array", "items": scalar, "minItems": 1},
        "description": {"type": "string"},
    }
    long_form = {
        "type": "object",
        "additionalProperties": False,
        "required": ["type"],
        "properties": {name: {"description": about, **values[name]} for name, about in PARAMETER_KEYS.items()},
    }
    return {"anyOf": [scalar, long_form]}


def _stage() -> dict[str, Any]:
    resources = _model(ResourcesSpec)
    memory = {"type": ["string", "integer"], "pattern": MEMORY_PATTERN}
    resources["properties"]["memory"]["anyOf"] = [memory, {"type": "null"}, _PARAM]
    values: dict[str, Any] = {
        "uses": {"oneOf": [{"const": kind.name, "description": kind.summary} for kind in KINDS.values()]},
        "description": {"type": "string"},
        "with": {"type": "object"},
        "resources": resources,
        "gates": {"type": "object", "additionalProperties": {"$ref": "#/$defs/condition"}},
        "retry": _model(RetryPolicy),
        "timeout_seconds": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _PARAM]},
    }
    plain = _model(FallbackLimits)["properties"]
    hop = {
        name: plain.get(name, values.get(name, {})) | {"description": about} for name, about in FALLBACK_KEYS.items()
    }
    values["fallback"] = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "additionalProperties": False, "properties": hop},
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["uses"],
        "properties": {name: values[name] | {"description": about} for name, about in STAGE_KEYS.items()},
        "allOf": [_of_kind(kind) for kind in KINDS.values()],
    }


def _of_kind(kind: StageKind) -> dict[str, Any]:
    """What follows from `uses: KIND`."""
    then: dict[str, Any] = {"properties": {"with": {"$ref": f"#/$defs/{kind.name}"}}}
    if any(info.is_required() for info in kind.parameters.model_fields.values()):
        then["required"] = ["with"]
    if kind.default_metrics:
        then["properties"]["gates"] = {"propertyNames": {"enum": list(kind.default_metrics)}}
    return {"if": {"properties": {"uses": {"const": kind.name}}, "required": ["uses"]}, "then": then}


def _model(model: type[BaseModel]) -> dict[str, Any]:
    """A pydantic model's schema with references to parameters allowed."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    opened = _open(schema, definitions=definitions, top=True)
    opened["description"] = schema.get("description", "")
    return opened


def _open(node: Mapping[str, Any], *, definitions: Mapping[str, Any], top: bool = False) -> dict[str, Any]:
    """Copy a schema node without pydantic's extras, with `${params.NAME}` beside what is no free text."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        target = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
        return _open(target, definitions=definitions, top=top)
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key in _DROPPED:
            continue
        if key == "properties":
            made[key] = {name: _open(child, definitions=definitions) for name, child in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            made[key] = _open(value, definitions=definitions)
        elif key == "anyOf":
            made[key] = _members(value, definitions=definitions)
        else:
            made[key] = value
    alternative = _alternative(made)
    if top or alternative is None:
        return made
    about: dict[str, Any] = {key: made.pop(key) for key in ("description", "default") if key in made}
    return {**about, "anyOf": [made, alternative]}


def _members(members: list[Mapping[str, Any]], *, definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The members of a union; references to parameters are added once, at its end."""
    opened: list[Mapping[str, Any]] = []
    added: list[Mapping[str, Any]] = []
    for member in members:
        made = _open(member, definitions=definitions, top=True)
        opened.append(made)
        alternative = _alternative(made)
        if alternative is not None and alternative not in added:
            added.append(alternative)
    return [*opened, *added]


def _alternative(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How a reference to a parameter looks in place of `node`; None where free text or a structure is expected."""
    if node.get("type") in ("integer", "number", "boolean"):
        return _PARAM
    if "enum" in node or "const" in node:
        return _TEMPLATE
    if "pattern" in node and not node["pattern"].startswith(_OUTPUT_PREFIX):
        return _TEMPLATE
    return None
