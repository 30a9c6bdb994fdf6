from pipeline.stages.parameters import RegisterModelParameters
from pipeline.tracking.parameter_table import flatten


def test_nested_parameters_become_dotted_rows():
    table = flatten({"a": {"b": 1, "c": {"d": True}}, "list": [1, 2], "stages": [{"x": 1}, {"x": 2}], "none": None})
    assert table == {
        "a.b": "1",
        "a.c.d": "true",
        "list": "[1, 2]",
        "stages.0.x": "1",
        "stages.1.x": "2",
        "none": "null",
    }


def test_empty_values_keep_their_row():
    assert flatten({"a": {}, "b": [], "c": ""}) == {"a": "{}", "b": "[]", "c": ""}
    assert flatten({}) == {}


def test_models_are_spread_like_mappings():
    given = RegisterModelParameters(model="${stages.flax.outputs.model}", name="m")
    assert flatten({"with": given})["with.model.stage"] == "flax"


def test_secrets_are_masked_by_name_and_in_uris():
    table = flatten({"password": "x", "uri": "http://u:p@h/", "num_tokens": 5, "list": ["http://u:p@h/"]})
    assert table == {"password": "***", "uri": "http://u:***@h/", "num_tokens": "5", "list": '["http://u:***@h/"]'}
