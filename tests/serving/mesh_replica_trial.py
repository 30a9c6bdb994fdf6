"""Run in a process with four CPU devices: a replica with two copies of a model, each on two devices. Prints JSON."""

import json
import sys
import tempfile
from pathlib import Path

from starlette.testclient import TestClient
from tiny_llama import CONFIG, make_tokenizer, random_leaves

from pipeline.models.checkpoint import save_parameters
from pipeline.serving.hosting.replica import Replica
from pipeline.serving.replica_settings import ReplicaConfig, ReplicaSettings

PROMPTS = ["def main():", "return the other", "in it", "the thing"]


def written(directory, seed):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer().save(str(directory / "tokenizer.json"))
    save_parameters(directory / "params", random_leaves(seed))
    return directory


def settings_of(directory, **given):
    return ReplicaSettings(
        name="tiny",
        model_path=str(directory),
        digest=directory.name,
        version=directory.name,
        deployment_id=directory.name,
        slots=2,
        context=32,
        prefill_chunk_tokens=16,
        decode_steps=2,
        device="cpu",
        **given,
    )


def answers(client):
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 6, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def trial(root):
    one, two = written(root / "one", 0), written(root / "two", 1)
    mesh = {"mesh_tensor": 2, "mesh_data": 2}
    replica = Replica.of(settings_of(one, **mesh))
    with TestClient(replica.app) as client:
        found = {"first": answers(client), "health": client.get("/health").json()}
        replica.reconfigure(ReplicaConfig(models=(settings_of(two, **mesh),)).as_json())
        found |= {"second": answers(client), "after": client.get("/health").json()}
        found["metrics"] = client.get("/metrics").text
        replica.check_health()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        json.dump(trial(Path(root)), sys.stdout)
