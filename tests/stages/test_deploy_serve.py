"""`deploy.serve` leaves a model answering over HTTP, replaces it in place, and keeps it when its successor fails."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.artifacts.store import open_store
from pipeline.cli.deployments import deployments, promote, rollback
from pipeline.cluster.endpoint import why_not_live
from pipeline.errors import ArtifactError, ParameterError, UsageError
from pipeline.models.checkpoint import abstract_leaves, save_parameters
from pipeline.models.registry import describe_config
from pipeline.serving.rollout.deployment_record import deployment_events
from pipeline.stages.deploy_serve import run
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import InputArtifact, Resources, StageContext
from pipeline.stages.reference import OutputReference
from pipeline.stages.reporting import BufferedReporter

VOCABULARY = 300
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def write_model(directory, seed=0):
    rng = np.random.default_rng(seed)
    leaves = {
        path: (np.ones(leaf.shape) if path.endswith("scale") else rng.normal(size=leaf.shape) * 0.3).astype(np.float32)
        for path, leaf in abstract_leaves(describe_config(CONFIG)).items()
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_parameters(directory / "params", leaves)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["def main(): return the other"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def context_of(tmp_path, model_path, *, digest="d" * 64, reporter=None, **given):
    parameters = DeployServeParameters(
        model=OutputReference(stage="flax", output="model"),
        **{"name": "tiny", "slots": 2, "prefill_chunk_tokens": 16, "ready_timeout_seconds": 120.0, **given},
    )
    model = InputArtifact(
        stage="flax",
        output="model",
        path=model_path,
        fingerprint="f" * 64,
        digest=digest,
        run_id="r1",
        metrics={},
    )
    return StageContext(
        run_id="r1",
        flow="test",
        stage="serve",
        attempt=1,
        fingerprint="f" * 64,
        parameters=parameters,
        inputs={"model": model},
        output_root=tmp_path / f"out-{time.monotonic_ns()}",
        workspace=str(tmp_path / "workspace"),
        project_root=tmp_path,
        resources=Resources(cpus=0.5, gpus=0.0),
        reporter=reporter or BufferedReporter(),
        deadline=None,
        environment={"store": str(tmp_path / "store"), "state_directory": str(tmp_path / "state")},
    )


def serving(facts):
    return httpx.get(facts["health_url"]).json()["models"]["tiny"]


def pids_of(application):
    from pipeline.serving.rollout.ray_rollout import running_applications

    replicas = running_applications()[application].replicas
    return sorted(replica.pid for replica in replicas if replica.state == "RUNNING")


def documents(text):
    """JSON documents, one behind the other."""
    decoder, found = json.JSONDecoder(), []
    while text.strip():
        document, end = decoder.raw_decode(text.lstrip())
        found.append(document)
        text = text.lstrip()[end:]
    return found


@contextlib.contextmanager
def hammering(url, *, num_clients):
    """Clients that ask without a pause; what they got."""
    answers, stop = [], threading.Event()

    def ask():
        body = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0}
        with httpx.Client(base_url=url, timeout=30) as client:
            while not stop.is_set():
                answer = client.post("/completions", json=body)
                assert answer.status_code != 503 or answer.headers["Retry-After"] == "1"
                answers.append((answer.status_code, answer.json()))

    with ThreadPoolExecutor(num_clients) as pool:
        asking = [pool.submit(ask) for _ in range(num_clients)]
        try:
            yield answers
        finally:
            stop.set()
        for one in asking:
            one.result()


def truncate(directory):
    largest = max((directory / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])


def add_tokens(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(40)])
    tokenizer.save(str(directory / "tokenizer.json"))


def store_integers(directory):
    shutil.rmtree(directory / "params")
    leaves = abstract_leaves(describe_config(CONFIG))
    save_parameters(directory / "params", {path: np.ones(leaf.shape, np.int32) for path, leaf in leaves.items()})


BROKEN = {
    "cut": (truncate, ArtifactError, "cannot be read"),
    "dtype": (store_integers, ArtifactError, "is int32, must be one of"),
    "extra-tokens": (add_tokens, ArtifactError, "vocabulary"),
}
ROLLBACK_SECONDS = 5.0
"""The promise; 0.44 s with the request that proves it."""
NUM_LOST = 0
"""Of all requests when one of two replicas is killed; HAProxy gives those it held to the other."""


@pytest.mark.ray
@pytest.mark.slow
def test_a_deployment_changes_versions_and_replicas_while_it_serves_and_outlives_broken_ones(
    ray_cluster, tmp_path, monkeypatch, capsys
):
    from pipeline.cluster import ray_connection
    from pipeline.serving.rollout.ray_serve import delete

    good = write_model(tmp_path / "good")
    context = context_of(tmp_path, good, digest="a" * 64)
    result = run(context)
    facts = result.facts
    assert result.metrics["smoke_tokens"] == 16
    assert facts["device"] == "cpu" and facts["dtype"] == "float32" and "auto" in facts["dtype_reason"]
    commit = SimpleNamespace(facts=facts)
    assert why_not_live(commit, {}) is None
    written = json.loads((context.output_root / "deployment" / "deployment.json").read_text())
    assert written["url"] == facts["url"] and written["model_digest"] == "a" * 64

    with httpx.Client(base_url=facts["url"], timeout=30) as client:
        assert client.get("/models").json()["data"][0]["id"] == "tiny"
        body = {"model": "tiny", "prompt": "def main", "max_tokens": 20, "temperature": 0}
        plain = client.post("/completions", json=body).json()
        with client.stream("POST", "/completions", json={**body, "stream": True}) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data: {")]
        assert len(events) > 1
        streamed = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)
        assert streamed == plain["choices"][0]["text"]
        assert client.post("/completions", json={**body, "max_tokens": 0}).status_code == 400

    assert facts["rolled_out"].startswith("started in")
    assert serving(facts)["version"] == "a" * 12

    other_model = write_model(tmp_path / "other", seed=1)
    reporter, pids = BufferedReporter(), pids_of("tiny")
    with hammering(facts["url"], num_clients=4) as answers:
        time.sleep(0.5)
        other = run(context_of(tmp_path, other_model, digest="b" * 64, reporter=reporter))
        time.sleep(0.5)
    assert other.facts["url"] == facts["url"] and pids_of("tiny") == pids
    assert any("nothing compiled" in str(report.payload.get("text")) for report in reporter.drain())
    assert serving(other.facts)["compiles_while_serving"] == 0
    assert {status for status, _ in answers} == {200}
    texts = {body["system_fingerprint"]: body["choices"][0]["text"] for _, body in answers}
    assert len(set(texts.values())) == 2
    assert all(body["choices"][0]["text"] == texts[body["system_fingerprint"]] for _, body in answers)
    assert "serves another model" in why_not_live(commit, {})
    assert why_not_live(SimpleNamespace(facts=other.facts), {}) is None

    for name, (break_it, error, words) in BROKEN.items():
        broken = tmp_path / name
        shutil.copytree(other_model, broken)
        break_it(broken)
        with pytest.raises(error) as caught:
            run(context_of(tmp_path, broken, digest=name[0] * 64))
        assert words in str(caught.value), name
        assert why_not_live(SimpleNamespace(facts=other.facts), {}) is None, name
    with monkeypatch.context() as patched, pytest.raises(ParameterError, match="are available"):
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
        run(context_of(tmp_path, good, digest="f" * 64))

    place = {"store": str(tmp_path / "store"), "address": ray_cluster, "cluster": None, "as_json": True}
    ray_connection.disconnect()
    started = time.monotonic()
    assert rollback(name="tiny", to=None, reason="a test", **place) == 0
    spent = time.monotonic() - started
    assert deployments(name=None, **place) == 0
    done, (row,) = documents(capsys.readouterr().out)
    assert (done["how"], done["source"]["digest"][0], done["target"]["digest"][0]) == ("swapped", "b", "a")
    assert done["seconds"] < ROLLBACK_SECONDS, f"{done['seconds']} s of {spent} s"
    assert (row["name"], row["running"], row["health"], row["traffic"]) == ("tiny", 1, "ok", "100 %")
    with pytest.raises(UsageError, match="already"):
        promote(name="tiny", version="a" * 12, reason="", **place)
    ray_connection.connect(ray_cluster, verbose=False)
    assert pids_of("tiny") == pids
    events = deployment_events(open_store(str(tmp_path / "store")), "tiny")
    assert [(event.action, event.how, event.target.digest[0]) for event in events] == [
        ("deploy", "started", "a"),
        ("deploy", "swapped", "b"),
        ("rollback", "swapped", "a"),
    ]

    run(context_of(tmp_path, good, digest="a" * 64, replicas=2))
    first, second = pids_of("tiny")
    with hammering(facts["url"], num_clients=8) as answers:
        time.sleep(0.7)
        os.kill(first, signal.SIGKILL)
        time.sleep(3.0)
    assert second in pids_of("tiny")
    assert {status for status, _ in answers} <= {200, 503}
    lost = [body for status, body in answers if status == 503]
    assert len(lost) <= NUM_LOST, f"{len(lost)} of {len(answers)}: {lost[:3]}"

    delete("tiny")
    assert why_not_live(SimpleNamespace(facts=other.facts), {}) is not None


def test_what_cannot_fit_is_refused_with_the_arithmetic(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29))
    with pytest.raises(ParameterError) as caught:
        run(context_of(tmp_path, model, slots=256, replicas=3))
    for term in ("3 replica(s) need", "256 slots x 128 tokens", "0.50 GiB are available", "weights"):
        assert term in str(caught.value)


def test_a_context_longer_than_the_model_and_cuda_without_a_gpu_are_refused(tmp_path):
    model = write_model(tmp_path / "model")
    with pytest.raises(ParameterError, match="served with 128 positions"):
        run(context_of(tmp_path, model, max_context_tokens=512))
    with pytest.raises(ParameterError, match="asks the cluster for no GPU"):
        run(context_of(tmp_path, model, device="cuda"))


def test_a_mesh_that_does_not_fit_the_model_is_refused_before_anything_starts(tmp_path):
    context = context_of(tmp_path, write_model(tmp_path / "model"), mesh={"tensor": 3, "data": 4})
    with pytest.raises(ParameterError) as caught:
        run(context)
    # Four query heads, two key-value heads, a feed-forward size of 64, two slots.
    assert "mesh.tensor is 3, which does not divide the 4 query heads, the feed-forward size" in str(caught.value)
    assert "allowed: 1, 2, 4" in str(caught.value) and "mesh.data is 4, which does not divide the 2 slots" in str(
        caught.value
    )


def test_a_model_directory_without_config_is_an_artifact_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"config\.json"):
        run(context_of(tmp_path, tmp_path / "empty"))


def test_the_version_is_that_of_the_registration(tmp_path):
    from pipeline.stages.deploy_serve import _version

    (tmp_path / "registration.json").write_text('{"version": "7"}')
    context = context_of(tmp_path, tmp_path)
    model = context.input("model")
    registration = replace(model, stage="register", output="registration")
    assert _version(context, model) == "d" * 12
    assert _version(replace(context, inputs={"model": model, "registration": registration}), model) == "7"


def test_a_traced_model_is_judged_by_the_size_of_its_parameters(tmp_path, monkeypatch):
    model = tmp_path / "model"
    (model / "params").mkdir(parents=True)
    (model / "program.json").write_text("{}")
    (model / "params" / "weights").write_bytes(bytes(2**20))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29))
    with pytest.raises(ParameterError, match=r"2 replica\(s\) need .* of weights while loading"):
        run(context_of(tmp_path, model, replicas=2))
