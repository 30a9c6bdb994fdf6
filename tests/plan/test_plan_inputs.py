"""Every kind's parameters can be read, hashed and described; a new kind is covered by being in the table."""

from typing import get_type_hints

import pytest
from pydantic import ValidationError

from pipeline.plan.fingerprint import canonical_json
from pipeline.plan.inputs import accepted_types, has_mark, source_paths, takes_artifacts
from pipeline.spec.check import check
from pipeline.spec.tree import MapNode, parse
from pipeline.stages.parameters import (
    DeployServeParameters,
    PythonCallParameters,
    RegisterModelParameters,
    TrainFsdpParameters,
)
from pipeline.stages.registry import KINDS


def test_inputs_are_found_in_plain_optional_list_and_mapping_fields():
    assert accepted_types(TrainFsdpParameters, "dataset") == ("dataset",)
    assert accepted_types(RegisterModelParameters, "evidence.0") == ("report",)
    assert "registration" in (accepted_types(DeployServeParameters, "registration") or ())
    assert "files" in (accepted_types(PythonCallParameters, "inputs.any") or ())
    assert accepted_types(TrainFsdpParameters, "steps") is None
    assert accepted_types(TrainFsdpParameters, "nothing") is None


def test_source_files_are_named():
    values = {"call": "m:f", "sources": ["a.py", "b.py"]}
    assert list(source_paths(PythonCallParameters, values)) == [("sources.0", "a.py"), ("sources.1", "b.py")]
    assert list(source_paths(TrainFsdpParameters, {"model": "m.json"})) == [("model", "m.json")]
    assert list(source_paths(TrainFsdpParameters, {})) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_field_of_every_kind_can_be_read_from_text(kind):
    for name in get_type_hints(kind.parameters):
        if name not in kind.parameters.model_fields:
            continue
        for text in ("5", "x", "[a]", "{a: 1}", "~"):
            tree, _ = parse(f"{name}: {text}\n", file="f.yaml")
            assert isinstance(tree, MapNode)
            check(tree, model=kind.parameters, path="with", params={})


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_default_has_a_stable_form(kind):
    for name, info in kind.parameters.model_fields.items():
        if not info.is_required() and not takes_artifacts(info):
            assert canonical_json(info.get_default(call_default_factory=True), where=name)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_marks_are_spelt_right(kind):
    for name, info in kind.parameters.model_fields.items():
        extra = info.json_schema_extra
        assert extra is None or has_mark(info, "identity", value=False) or has_mark(info, "source_file", value=True), (
            name
        )


def test_parameters_are_frozen():
    given = PythonCallParameters(call="m:f")
    with pytest.raises(ValidationError):
        given.call = "m:g"
