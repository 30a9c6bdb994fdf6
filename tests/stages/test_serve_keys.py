"""API keys of a deployment: the flow names their place, and nothing that is written down holds one."""

import json

import pytest

from pipeline.errors import ParameterError, SpecError
from pipeline.plan.fingerprint import fingerprint_of
from pipeline.plan.graph import open_flow
from pipeline.serving.api_keys import digest_of
from pipeline.stages.deploy_serve import key_digests
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.reference import OutputReference

KEY = "plain-key-in-a-flow-0123456789"
FLOW = """\
flow: keys
description: Serves behind keys.
stages:
  model:
    uses: import.checkpoint
    with: {source: weights}
  flax:
    uses: convert.flax
    with: {checkpoint: "${stages.model.outputs.checkpoint}"}
  serve:
    uses: deploy.serve
    with:
      model: ${stages.flax.outputs.model}
      name: tiny
      api_keys: "KEYS"
"""


def opened(tmp_path, api_keys):
    (tmp_path / "weights").mkdir(exist_ok=True)
    path = tmp_path / "flow.yaml"
    path.write_text(FLOW.replace("KEYS", api_keys))
    return open_flow(path)


@pytest.mark.parametrize("wrong", [KEY, f"vault:{KEY}", "env:"])
def test_a_value_that_is_no_reference_is_refused_and_not_shown(tmp_path, wrong):
    with pytest.raises(SpecError) as raised:
        opened(tmp_path, wrong)
    told = str(raised.value)
    assert "flow.yaml:15" in told and "env:NAME or file:PATH" in told
    assert KEY not in told and KEY not in repr(raised.value.problems)


def test_the_place_is_identity_and_the_key_is_in_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYS_OF_THE_TEST", KEY)
    stages = [opened(tmp_path, place).stages[2] for place in ("env:KEYS_OF_THE_TEST", "file:keys")]
    found = [fingerprint_of(stage, inputs={"model": "d" * 64}, sources={}) for stage in stages]
    assert found[0].value != found[1].value
    assert KEY not in json.dumps(found[0].parts, default=str)


def test_the_stage_reads_keys_from_the_project_and_keeps_their_digests(tmp_path):
    def parameters(place):
        model = OutputReference(stage="flax", output="model")
        return DeployServeParameters(model=model, name="tiny", api_keys=place)

    (tmp_path / "keys").write_text(KEY)
    assert key_digests(parameters(None), project_root=tmp_path) == ()
    digests = key_digests(parameters("file:keys"), project_root=tmp_path)
    assert digests == (digest_of(KEY),)
    with pytest.raises(ParameterError, match=r"ABSENT_OF_THE_TEST.*not set") as raised:
        key_digests(parameters("env:ABSENT_OF_THE_TEST"), project_root=tmp_path)
    assert "pipeline down" in raised.value.hint
