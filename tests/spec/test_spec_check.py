from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipeline.spec.check import check
from pipeline.spec.grammar import is_name
from pipeline.spec.params import read_params
from pipeline.spec.tree import MapNode, parse


class Reference(BaseModel):
    stage: str


def parse_reference(value):
    if isinstance(value, str):
        if not value.startswith("${stages."):
            raise ValueError("a reference is needed")
        return Reference(stage=value.split(".")[1])
    return value


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = Field(default=1, ge=1)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    count: int = Field(default=5, ge=1, description="How many.")
    rate: float = Field(default=0.5, gt=0.0, le=1.0)
    flag: bool = False
    name: str = Field(default="x", pattern="^[a-z0-9.]+$")
    free: str = ""
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    items: list[int] = Field(default_factory=list)
    table: dict[str, bool | int | float | str | list[int]] = Field(default_factory=dict)
    inner: Inner = Inner()
    switch: bool | Inner = False
    source: Annotated[Reference, BeforeValidator(parse_reference)] | None = None


class Timed(BaseModel):
    every: Literal["auto"] | Annotated[float, Field(gt=0)] | None = None


class Required(BaseModel):
    model_config = ConfigDict(extra="forbid")
    steps: int = Field(description="Optimizer steps.")


class Ordered(BaseModel):
    low: int
    high: int

    @model_validator(mode="after")
    def _order(self):
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


def run(text, *, model=Model, params=""):
    root, problems = parse(text, file="f.yaml")
    assert isinstance(root, MapNode) and not problems
    tree, problems = parse(params, file="p.yaml") if params else (None, [])
    assert not problems
    read = read_params(tree, overrides=(), is_name=is_name)
    assert not read.problems
    return check(root, model=model, path="with", params=read.params)


def value(text, **more):
    checked = run(text, **more)
    assert not checked.problems, checked.problems
    return checked.value


def problem(text, **more):
    checked = run(text, **more)
    assert checked.value is None
    (found,) = checked.problems
    return found


def test_the_type_of_the_field_decides():
    made = value("count: 0x10\nrate: 1e-5\nflag: true\nname: 007\nfree: yes\nlimit: 3\nitems: [1, 2]\n")
    assert (made.count, made.rate, made.flag, made.name, made.free, made.limit) == (16, 1e-5, True, "007", "yes", 3)
    assert made.items == [1, 2]


def test_a_switch_may_be_given_with_its_settings():
    assert value("switch: true").switch is True
    assert value("switch: {depth: 3}").switch == Inner(depth=3)
    assert problem("switch: {depth: 0}").path == "with.switch.depth"
    assert problem("switch: [1]").allowed == ("true or false or a mapping with the keys depth",)


def test_a_number_may_be_a_word_instead():
    assert [value(f"every: {text}", model=Timed).every for text in ("auto", "30", "null")] == ["auto", 30.0, None]
    assert value("every: ${params.s}", model=Timed, params="s: auto").every == "auto"
    assert value("every: ${params.n}", model=Timed, params="n: 30").every == 30.0
    for wrong in ("often", "[1]"):
        assert problem(f"every: {wrong}", model=Timed).path.startswith("with.every")


@pytest.mark.parametrize("text", ["1.0", "1e-5", "null.", "12:30", "2024-01-01", "0x1F", "TRUE"])
def test_text_fields_keep_the_source_text(text):
    assert value(f"free: {text}").free == text


def test_nothing_is_none_where_none_is_allowed():
    assert value("limit:").limit is None
    assert value("limit: ~").limit is None


@pytest.mark.parametrize(
    ("text", "code", "allowed"),
    [
        ("count: 1.0", "wrong-type", "whole number"),
        ("count: '5'", "wrong-type", "whole number"),
        ("count: [5]", "wrong-type", "whole number"),
        ("count:", "wrong-type", "whole number"),
        ("rate: fast", "wrong-type", "number"),
        ("rate: .nan", "wrong-type", "number"),
        ("flag: yes", "wrong-type", "true or false"),
        ("flag: 1", "wrong-type", "true or false"),
        ("free: [a]", "wrong-type", "text"),
        ("free: ~", "wrong-type", "text"),
        ("items: 5", "wrong-type", "list"),
        ("items: [1, x]", "wrong-type", "whole number"),
        ("table: [1]", "wrong-type", "mapping"),
        ("inner: 5", "wrong-value", ""),
        ("mode: quick", "wrong-value", "fast, slow"),
        ("count: 0", "out-of-range", ">= 1"),
        ("rate: 1.5", "out-of-range", "<= 1"),
        ("limit: x", "wrong-type", "whole number"),
        ("name: A!", "wrong-form", "^[a-z0-9.]+$"),
        ("source: data", "wrong-value", ""),
    ],
)
def test_what_does_not_fit(text, code, allowed):
    found = problem(text)
    assert found.code == code
    assert allowed in ", ".join(found.allowed)
    assert found.position.line == 1
    assert found.path.startswith("with.")


def test_positions_reach_into_lists_and_models():
    found = problem("inner:\n  depth: 0\n")
    assert (found.path, found.position.line, found.position.column) == ("with.inner.depth", 2, 10)
    found = problem("items:\n  - 1\n  - x\n")
    assert (found.path, found.position.line, found.position.column) == ("with.items.1", 3, 5)


def test_unknown_keys_name_the_nearest():
    found = problem("cuont: 5")
    assert (found.code, found.nearest) == ("unknown-key", "count")
    assert "rate" in found.allowed


def test_missing_keys_say_what_they_are_for():
    found = problem("{}", model=Required)
    assert found.code == "missing-key"
    assert "steps" in found.found and "Optimizer steps" in found.found


def test_a_wrong_required_key_is_not_missing_too():
    assert problem("steps: x", model=Required).code == "wrong-type"


def test_everything_wrong_comes_at_once():
    checked = run("count: x\nrate: 2\nflag: no\nmode: f\nextra: 1\n")
    assert [found.code for found in checked.problems] == [
        "wrong-type",
        "wrong-type",
        "wrong-value",
        "unknown-key",
        "out-of-range",
    ]


def test_the_default_is_named_where_a_value_was_left_out():
    assert "default 5" in problem("count:").hint


def test_checks_across_fields_point_at_the_mapping():
    found = problem("low: 5\nhigh: 1\n", model=Ordered)
    assert found.path == "with"
    assert "low is above high" in found.found


def test_mixed_values_follow_yaml_1_2():
    table = value("table: {a: 1, b: 1.5, c: true, d: yes, e: '5', f: 1e-5, g: [1, 2]}").table
    assert table == {"a": 1, "b": 1.5, "c": True, "d": "yes", "e": "5", "f": 1e-5, "g": [1, 2]}
    assert type(table["a"]) is int and type(table["b"]) is float


PARAMS = "i: 7\nf: 0.5\nb: true\ns: text\nn: {type: str, default: '5'}\n"


def test_whole_parameters_are_typed():
    made = value(
        "count: ${params.i}\nrate: ${params.f}\nflag: ${params.b}\nfree: ${params.s}\nitems: [1, '${params.i}']\n"
        "table: {k: '${params.f}'}",
        params=PARAMS,
    )
    assert (made.count, made.rate, made.flag, made.free, made.items) == (7, 0.5, True, "text", [1, 7])
    assert made.table == {"k": 0.5}


def test_integers_widen_and_anything_becomes_text():
    made = value("rate: ${params.one}\nfree: ${params.one}", params="one: 1\n")
    assert made.rate == 1.0 and isinstance(made.rate, float)
    assert made.free == "1"


def test_parameters_inside_text():
    assert value("free: 'a-${params.i}-${params.f}-$${x}'", params=PARAMS).free == "a-7-0.5-${x}"


@pytest.mark.parametrize("text", ["count: ${params.f}", "count: ${params.n}", "flag: ${params.i}", "rate: ${params.s}"])
def test_declared_types_do_not_change_silently(text):
    found = problem(text, params=PARAMS)
    assert found.code == "wrong-type"
    assert "declared" in found.found and "type:" in found.hint


def test_numbers_are_not_glued_together():
    assert problem("count: 1${params.i}", params=PARAMS).code == "wrong-type"


def test_ranges_hold_for_parameters_and_say_where_the_value_came_from():
    found = problem("rate: ${params.i}", params=PARAMS)
    assert found.code == "out-of-range"
    assert "7.0" in found.found and "${params.i}" in found.found


def test_an_artifact_is_no_value():
    assert problem("count: ${stages.a.outputs.b}").code == "unexpected-reference"
    assert problem("free: x ${stages.a.outputs.b}").code == "unexpected-reference"
    assert value("source: ${stages.a.outputs.b}").source == Reference(stage="a")


def test_a_parameter_in_error_is_not_told_twice():
    checked = run("count: ${params.gone}\nfree: 'x ${params.gone}'\n")
    assert checked.value is None
    assert checked.problems == ()
