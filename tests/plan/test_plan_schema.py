import copy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from pipeline.plan.schema import flow_schema, schema_text
from pipeline.stages.registry import KINDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def validator():
    schema = flow_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.fixture
def flow():
    return YAML(typ="safe", pure=True).load((ROOT / "flows" / "llm.yaml").read_text())


def test_the_shipped_schema_is_current():
    shipped = (ROOT / "configs" / "flow.schema.json").read_text()
    assert shipped == schema_text(), "run: pipeline schema > configs/flow.schema.json"


@pytest.mark.parametrize("path", sorted((ROOT / "flows").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_flows_fit_and_name_the_schema(validator, path):
    text = path.read_text()
    assert text.splitlines()[0] == "# yaml-language-server: $schema=../configs/flow.schema.json"
    assert list(validator.iter_errors(YAML(typ="safe", pure=True).load(text))) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("extra",), 1),
        (("flow",), "my flow"),
        (("stages", "train", "stpes"), 1),
        (("stages", "train", "uses"), "train.fdsp"),
        (("stages", "train", "with", "stpes"), 1),
        (("stages", "train", "with", "steps"), "many"),
        (("stages", "train", "with", "steps"), 0),
        (("stages", "train", "with", "precision"), "float64"),
        (("stages", "train", "with", "dataset"), "data"),
        (("stages", "train", "with", "compile"), "yes"),
        (("stages", "train", "gates"), {"validation_lss": "<= 5"}),
        (("stages", "train", "gates"), {"validation_loss": "about 5"}),
        (("stages", "train", "resources", "workers"), 0),
        (("stages", "register", "with", "evidence"), "${stages.parity.outputs.report}"),
        (("params", "steps", "type"), "integer"),
        (("params", "steps"), [1]),
    ],
)
def test_what_the_loader_refuses_the_schema_refuses(validator, flow, place, value):
    spot = flow
    for key in place[:-1]:
        spot = spot[key]
    spot[place[-1]] = value
    assert list(validator.iter_errors(flow))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", "${params.steps}"),
        ("learning_rate", "${params.learning_rate}"),
        ("compile", "${params.compile}"),
        ("precision", "${params.precision}"),
        ("precision", "float${params.bits}"),
        ("seed", 3),
    ],
)
def test_parameters_may_stand_for_values(validator, flow, name, value):
    flow["stages"]["train"]["with"][name] = value
    assert list(validator.iter_errors(flow)) == []


def test_required_keys_are_required(validator, flow):
    for stage, key in (("train", "steps"), ("flax", "checkpoint"), ("serve", "name")):
        broken = copy.deepcopy(flow)
        del broken["stages"][stage]["with"][key]
        assert list(validator.iter_errors(broken)), (stage, key)
    del flow["stages"]["flax"]["with"]
    assert list(validator.iter_errors(flow))


def test_every_kind_and_every_parameter_is_described():
    schema = flow_schema()
    for kind in KINDS.values():
        described = schema["$defs"][kind.name]["properties"]
        assert set(described) == set(kind.parameters.model_fields)
        for name, about in described.items():
            assert about.get("description"), f"{kind.name}.{name} has no description"
