import pytest

from pipeline.spec.grammar import is_name
from pipeline.spec.params import read_params
from pipeline.spec.tree import parse


def read(text, *overrides):
    tree, problems = parse(text, file="f.yaml")
    assert not problems
    return read_params(tree, overrides=overrides, is_name=is_name)


def values(text, *overrides):
    found = read(text, *overrides)
    assert found.problems == ()
    return {name: param.value for name, param in found.params.items()}


def problem(text, *overrides):
    (found,) = read(text, *overrides).problems
    return found


def test_the_short_form_takes_its_type_from_yaml():
    found = values("i: 150\nf: 1e-5\nb: true\ns: text\nq: '150'\ny: yes\n")
    assert found == {"i": 150, "f": 1e-5, "b": True, "s": "text", "q": "150", "y": "yes"}
    assert isinstance(found["f"], float) and isinstance(found["q"], str)


def test_the_long_form_takes_the_declared_type():
    found = values("a: {type: float, default: 3}\nb: {type: str, default: 007}\nc: {type: path, default: x/y}\n")
    assert found == {"a": 3.0, "b": "007", "c": "x/y"}
    assert isinstance(found["a"], float)


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ("int", "200", 200),
        ("float", "1e-5", 1e-5),
        ("float", "3", 3.0),
        ("bool", "false", False),
        ("str", "007", "007"),
        ("str", "1e-5", "1e-5"),
        ("str", "null", "null"),
        ("str", "a=b", "a=b"),
        ("str", "", ""),
        ("str", "${params.x}", "${params.x}"),
        ("path", "/data/x", "/data/x"),
    ],
)
def test_overrides_are_read_by_the_declared_type(declared, text, value):
    found = values(f"x: {{type: {declared}}}\n", f"x={text}")
    assert found == {"x": value}
    assert type(found["x"]) is type(value)


@pytest.mark.parametrize(
    ("declared", "text"),
    [("int", "1.0"), ("int", "1e3"), ("int", ""), ("bool", "yes"), ("bool", "1"), ("float", "nan"), ("path", "")],
)
def test_overrides_of_another_type_are_refused(declared, text):
    found = problem(f"x: {{type: {declared}}}\n", f"x={text}")
    assert found.code == "wrong-override"
    assert found.allowed
    assert str(found.position) == "-P:1:3"


def test_overrides_that_name_nothing():
    found = read("steps: 1\n", "stps=3", "steps", "=3", "steps=2", "steps=3")
    assert [each.code for each in found.problems] == [
        "unknown-parameter",
        "wrong-override",
        "wrong-override",
        "wrong-override",
    ]
    assert found.problems[0].nearest == "steps"
    assert found.params["steps"].value == 2


def test_overrides_of_a_flow_without_parameters():
    (found,) = read_params(None, overrides=["x=1"], is_name=is_name).problems
    assert found.allowed == ("none",)


def test_ranges_hold_for_defaults_and_overrides():
    declaration = "x: {type: int, default: 5, minimum: 1, maximum: 9}\n"
    assert values(declaration, "x=9") == {"x": 9}
    assert problem(declaration, "x=10").allowed == (">= 1", "<= 9")
    assert problem("x: {type: int, default: 0, minimum: 1}\n").code == "out-of-range"


def test_choices_hold():
    declaration = "x: {type: str, default: a, choices: [a, b]}\n"
    assert values(declaration, "x=b") == {"x": "b"}
    assert problem(declaration, "x=c").allowed == ("a", "b")


def test_a_parameter_without_default_must_be_given():
    found = problem("x: {type: int}\n")
    assert found.code == "missing-parameter"
    assert "-P x=" in found.hint


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x: {default: 5}\n", "missing-key"),
        ("x: {type: integer, default: 5}\n", "wrong-value"),
        ("x: {type: [int], default: 5}\n", "wrong-value"),
        ("x: {type: int, default: '5'}\n", "wrong-type"),
        ("x: {type: int, default: 1.0}\n", "wrong-type"),
        ("x: {type: int, default: [1]}\n", "wrong-type"),
        ("x: {type: str, default: ~}\n", "wrong-type"),
        ("x: {type: str, default: a, minimum: 3}\n", "wrong-type"),
        ("x: {type: int, default: 5, minimum: 9, maximum: 1}\n", "wrong-value"),
        ("x: {type: int, default: 5, choices: 5}\n", "wrong-type"),
        ("x: {type: int, default: 5, choices: []}\n", "wrong-type"),
        ("x: {type: int, default: 5, descripton: a}\n", "unknown-key"),
        ("x: {type: int, default: 5, description: [a]}\n", "wrong-type"),
        ("x:\n", "wrong-type"),
        ("x: [1]\n", "wrong-type"),
        ("x: ${params.y}\n", "unexpected-reference"),
        ("'a b': 5\n", "wrong-name"),
        ("[1]\n", "wrong-type"),
        ("5\n", "wrong-type"),
    ],
)
def test_declarations_that_are_wrong(text, code):
    assert problem(text).code == code


def test_an_escaped_reference_is_text():
    assert values("x: $${HOME}\n") == {"x": "${HOME}"}
