"""The fields that constrain the text of an answer: `response_format`, `regex` and `grammar`.

Owns their shapes. Pure: whether a constraint can be compiled is judged where it is. The one decision: a body has one
constraint at most.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.serving.json_body import Fields, shown

FIELDS = ("response_format", "regex", "grammar")
_TYPES = ("text", "json_object", "json_schema")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the text must be."""

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    text: str
    """The schema as JSON, the expression, or the grammar in Lark's language; empty for any object."""
    field: str
    """Where it stands in the body."""


def read_constraint(reader: Fields) -> Constraint | None:
    """Judge the fields; complaints are left in `reader`."""
    found = [constraint for constraint in (_response_format(reader), *_texts(reader)) if constraint is not None]
    if len(found) > 1:
        reader.complain(found[1].field, f"and {found[0].field} constrain the text both; only one may")
    return found[0] if found else None


def _texts(reader: Fields) -> list[Constraint]:
    found = []
    for name in ("regex", "grammar"):
        value = reader.fields.get(name)
        if isinstance(value, str) and value:
            found.append(Constraint(kind="regex" if name == "regex" else "grammar", text=value, field=name))
        elif value is not None:
            reader.complain(name, f"must be a text that is not empty, found {shown(value)}")
    return found


def _response_format(reader: Fields) -> Constraint | None:
    value = reader.fields.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _TYPES:
        example = " or ".join(f'{{"type": "{name}"}}' for name in _TYPES)
        reader.complain("response_format", f"must be {example}, found {shown(value)}")
        return None
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    unknown = sorted(set(value) - known)
    if unknown:
        reader.complain("response_format", f"has {', '.join(unknown)}, which {kind} does not take")
    if kind == "json_schema":
        return _schema(reader, value.get("json_schema"))
    return None if kind == "text" else Constraint(kind="json_object", text="", field="response_format")


def _schema(reader: Fields, value: object) -> Constraint | None:
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(schema, dict | bool):
        reader.complain(
            "response_format", f'json_schema must be {{"name": ..., "schema": {{...}}}}, found {shown(value)}'
        )
        return None
    problems = _problems_of_names(value)
    for problem in problems:
        reader.complain("response_format", f"json_schema: {problem}")
    if problems:
        return None
    return Constraint(kind="json_schema", text=json.dumps(schema), field="response_format")


def _problems_of_names(value: Mapping[str, Any]) -> list[str]:
    problems = [f"unknown field {name}" for name in sorted(set(value) - {"name", "description", "schema", "strict"})]
    if not isinstance(value.get("name", ""), str):
        problems.append(f"name must be a text, found {shown(value['name'])}")
    if not isinstance(value.get("description"), str | None):
        problems.append(f"description must be a text, found {shown(value['description'])}")
    if not isinstance(value.get("strict"), bool | None):
        problems.append(f"strict must be true or false, found {shown(value['strict'])}")
    return problems


def call_of_one(tools: Sequence[Mapping[str, Any]]) -> Constraint:
    """A text that is a call of one of these tools, in JSON, with the arguments of its schema.

    Definitions stand at the top of the whole, where their references look for them.

    Raises:
        ValueError: two tools have different definitions of one name.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool["function"].get("parameters") or {"type": "object"})
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"two tools define {name} differently")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"anyOf": calls} | ({"$defs": definitions} if definitions else {})
    # llguidance's own keyword: a call needs no white space, and a model could spend its tokens on it.
    schema["x-guidance"] = {"whitespace_pattern": " ?"}
    return Constraint(kind="json_schema", text=json.dumps(schema), field="tool_choice")
