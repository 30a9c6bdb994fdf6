import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.plan.fingerprint import canonical_json, fingerprint_of
from pipeline.stages.protocol import Resources

DIGEST = "d" * 64
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def train(open_text, chain):
    return open_text(chain).stages[1]


def of(stage, *, dataset=DIGEST, sources=None):
    return fingerprint_of(stage, inputs={"dataset": dataset}, sources=sources or {})


def changed(stage, **updates):
    return replace(stage, parameters=stage.parameters.model_copy(update=updates))


def test_the_same_stage_has_the_same_fingerprint(train, open_text, chain):
    again = open_text(chain, file="elsewhere/other.yaml").stages[1]
    assert of(train) == of(again)
    assert len(of(train).value) == 64


@pytest.mark.parametrize(
    "updates", [{"steps": 151}, {"seed": 1}, {"learning_rate": 2e-3}, {"precision": "bfloat16"}, {"compile": True}]
)
def test_parameters_are_identity(train, updates):
    assert of(changed(train, **updates)).value != of(train).value


@pytest.mark.parametrize("updates", [{"device": "cpu"}, {"log_every_steps": 1}, {"max_worker_failures": 9}])
def test_what_cannot_change_the_result_is_not(train, updates):
    assert of(changed(train, **updates)).value == of(train).value


def test_resources_gates_retries_and_names_are_not(train):
    other = replace(
        train, name="other", resources=Resources(workers=8, gpus=1), gates=(), timeout_seconds=1.0, description="x"
    )
    assert of(other).value == of(train).value


def test_inputs_and_sources_are_identity_by_content(train):
    values = {of(train).value, of(train, dataset="e" * 64).value, of(train, sources={"text": "f" * 64}).value}
    assert len(values) == 3


def test_source_files_are_identity_by_content_and_not_by_name(train, open_text, chain, project):
    (project / "copy.json").write_bytes((project / "model.json").read_bytes())
    copied = open_text(chain.replace("model.json", "copy.json")).stages[1]
    assert of(copied).value == of(train).value
    before = of(train).value
    (project / "model.json").write_text('{"hidden_size": 16}')
    assert of(train).value != before


def test_text_is_identity_by_content_and_not_by_where_it_lies(open_text, chain):
    here, there = (open_text(chain.replace("stdlib", place)).stages[0] for place in ("a/texts", "/elsewhere/texts"))
    prints = [fingerprint_of(stage, inputs={}, sources={"source": DIGEST}).value for stage in (here, there)]
    assert prints[0] == prints[1]


def test_the_kind_and_its_version_are_identity(train):
    newer = replace(train, kind=replace(train.kind, version=train.kind.version + 1))
    assert of(newer).value != of(train).value


def test_no_path_is_in_the_parts(train, project):
    assert str(project) not in canonical_json(of(train).parts, where="parts")
    assert "model.json" not in canonical_json(of(train).parts, where="parts")


def test_a_source_file_that_went_away_is_named(train, project):
    (project / "model.json").unlink()
    with pytest.raises(ParameterError, match=r"'model'.*model\.json"):
        of(train)


def test_digests_of_other_inputs_are_refused(train):
    with pytest.raises(ValueError, match="dataset"):
        fingerprint_of(train, inputs={}, sources={})


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", Path("x"), object(), math.nan, math.inf, {1: 2}, {"a": [1, {"b": {3}}]}, lambda: 1]
)
def test_values_without_a_stable_form_are_refused_by_name(value):
    with pytest.raises(ParameterError, match=r"^stage train\.field"):
        canonical_json({"field": value}, where="stage train")


def test_the_order_of_keys_does_not_matter():
    assert canonical_json({"a": 1, "b": 2}, where="x") == canonical_json({"b": 2, "a": 1}, where="x")
    assert canonical_json(-0.0, where="x") == canonical_json(0.0, where="x")
    assert canonical_json(1, where="x") != canonical_json(1.0, where="x")
    assert canonical_json(True, where="x") != canonical_json(1, where="x")


@given(JSON_VALUES)
def test_canonical_json_is_a_fixed_point(value):
    text = canonical_json(value, where="x")
    assert canonical_json(json.loads(text), where="x") == text


def test_another_process_finds_the_same_fingerprint(train, chain, project):
    (project / "flow.yaml").write_text(chain)
    code = (
        "import sys, pathlib; from pipeline.plan.graph import open_flow; "
        "from pipeline.plan.fingerprint import fingerprint_of; "
        "stage = open_flow(pathlib.Path(sys.argv[1])).stages[1]; "
        f"print(fingerprint_of(stage, inputs={{'dataset': '{DIGEST}'}}, sources={{}}).value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(project / "flow.yaml")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == of(train).value
