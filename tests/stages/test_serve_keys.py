"""API keys of a deployment: the flow names their place, and nothing that is written down holds one."""

import json
from pathlib import Path

import httpx
import pytest
import ray
from test_deploy_serve import context_of, pids_of, write_model

from pipeline.errors import ParameterError, SpecError
from pipeline.plan.fingerprint import fingerprint_of
from pipeline.plan.graph import open_flow
from pipeline.serving.http.api_keys import digest_of
from pipeline.stages.deploy_serve import key_digests, run
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.reference import OutputReference

KEY = "plain-key-in-a-flow-0123456789"
NEW_KEY = "another-key-in-a-file-0123456789"
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


@pytest.mark.ray
@pytest.mark.slow
def test_a_deployment_behind_keys_answers_who_has_one_and_holds_none(ray_cluster, tmp_path):
    from pipeline.serving.rollout.ray_rollout import running_applications
    from pipeline.serving.rollout.ray_serve import delete

    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "keys").write_text(KEY)
    result = run(context_of(tmp_path, model, api_keys="file:keys", requests_per_minute=30))
    url, facts = result.facts["url"], result.facts
    body = {"model": "tiny", "messages": [{"role": "user", "content": "def main"}], "max_tokens": 3}

    def status(key):
        answer = httpx.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code, answer.headers.get("x-ratelimit-remaining-requests")

    assert "/chat/completions" in facts["curl"] and "$API_KEY" in facts["curl"]
    assert httpx.get(f"{url}/models").status_code == 401 and status("x" * 20)[0] == 401
    assert status(KEY) == (200, "29")
    pids = pids_of("tiny")
    (tmp_path / "keys").write_text(NEW_KEY)
    run(context_of(tmp_path, model, api_keys="file:keys", requests_per_minute=30))
    assert pids_of("tiny") == pids, "new keys need no new process"
    assert status(KEY)[0] == 401 and status(NEW_KEY)[0] == 200

    told = [repr(running_applications()["tiny"].config.as_json()), repr(facts)]
    session = Path(ray.worker._global_node.get_session_dir_path())
    files = [*(tmp_path / "store").rglob("*"), *(session / "logs").rglob("*")]
    told += [file.read_text(errors="replace") for file in files if file.is_file()]
    assert digest_of(NEW_KEY) in told[0] and len(told) > 5
    assert not any(key in text for key in (KEY, NEW_KEY) for text in told)
    delete("tiny")
