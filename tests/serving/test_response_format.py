"""A forced call as a schema: what it takes and what not, by an independent judge of schemas."""

import json

import jsonschema
import pytest

from pipeline.serving.grammar.response_format import call_of_one

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COLOURS = {"type": "object", "$defs": {"c": {"enum": ["red"]}}, "properties": {"c": {"$ref": "#/$defs/c"}}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ({"name": "add", "arguments": {"a": 3}}, True),
        ({"name": "paint", "arguments": {"c": "red"}}, True),
        ({"name": "rest", "arguments": {"anything": [1]}}, True),
        ({"name": "add", "arguments": {"a": "3"}}, False),
        ({"name": "add", "arguments": {"c": "red"}}, False),
        ({"name": "paint", "arguments": {"c": "blue"}}, False),
        ({"name": "other", "arguments": {}}, False),
        ({"name": "add", "arguments": {"a": 3}, "more": 1}, False),
        ({"name": "add"}, False),
    ],
)
def test_a_forced_call_is_one_of_the_tools_with_its_own_arguments(call, fits):
    constraint = call_of_one([tool("add", ADD), tool("paint", COLOURS), tool("rest")])
    assert constraint.kind == "json_schema" and constraint.field == "tool_choice"
    validator = jsonschema.Draft202012Validator(json.loads(constraint.text))
    assert validator.is_valid(call) is fits


def test_definitions_are_shared_where_they_are_the_same_and_refused_where_they_differ():
    assert json.loads(call_of_one([tool("one", COLOURS), tool("two", COLOURS)]).text)["$defs"] == COLOURS["$defs"]
    other = {**COLOURS, "$defs": {"c": {"enum": ["blue"]}}}
    with pytest.raises(ValueError, match="define c differently"):
        call_of_one([tool("one", COLOURS), tool("two", other)])
    assert call_of_one([tool("one", other)]) != call_of_one([tool("one", COLOURS)])
