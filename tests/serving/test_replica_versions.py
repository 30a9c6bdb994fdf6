"""A process is brought to what its configuration lists; what cannot be had leaves it as it was."""

import asyncio
import dataclasses
import json
import shutil
import threading
import time
import uuid

import httpx
import pytest
from tiny_llama import CONFIG, random_leaves
from tokenizers import Tokenizer

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.checkpoint import save_parameters
from pipeline.serving.hosting.replica import Replica
from pipeline.serving.replica_settings import ReplicaConfig, ReplicaSettings, read_config

ROLLBACK_SECONDS = 5.0
"""The promise; 0.008 s for SmolLM2-135M in float32, where nothing runs."""
ASK = {"prompt": "def main():", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def versions(tmp_path_factory, tokenizer):
    """Directories of three models that differ in their numbers alone."""
    root = tmp_path_factory.mktemp("versions")

    def write(name, seed, config=CONFIG):
        directory = root / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        tokenizer.save(str(directory / "tokenizer.json"))
        save_parameters(directory / "params", random_leaves(seed=seed))
        return directory

    return {name: write(name, seed) for seed, name in enumerate(("1", "2", "3"))}


def settings_of(directory, *, name="tiny", **given):
    return ReplicaSettings(
        **{
            "name": name,
            "model_path": str(directory),
            "digest": f"{directory.name}00000000000000",
            "version": directory.name,
            "deployment_id": uuid.uuid4().hex,
            "slots": 4,
            "context": 64,
            "prefill_chunk_tokens": 16,
            "decode_steps": 2,
            **given,
        }
    )


def config_of(*models):
    return ReplicaConfig(models=models).as_json()


@pytest.fixture(scope="module")
def replica(versions):
    made = Replica()
    made.reconfigure(config_of(settings_of(versions["1"])))
    yield made
    made.stop()


def client_of(replica):
    return httpx.AsyncClient(transport=httpx.ASGITransport(replica.app), base_url="http://test")


async def complete(client, **given):
    answer = await client.post("/v1/completions", json={"model": "tiny", **ASK, **given}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


LOOP = asyncio.new_event_loop()
"""An engine answers to the loop of its first request, as in a server."""


@pytest.fixture(scope="module", autouse=True)
def loop():
    thread = threading.Thread(target=LOOP.run_forever, daemon=True)
    thread.start()
    yield
    LOOP.call_soon_threadsafe(LOOP.stop)
    thread.join()
    LOOP.close()


def run(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, LOOP).result(timeout=60)


def ask(replica, path="/v1/completions", **given):
    async def once():
        async with client_of(replica) as client:
            if path == "/v1/completions":
                return await complete(client, **given)
            return (await client.get(path)).json()

    return run(once())


def become(replica, directory, **given):
    settings = settings_of(directory, **given)
    replica.reconfigure(config_of(settings))
    return settings


@pytest.fixture(scope="module")
def texts(replica, versions):
    """What each version answers."""
    found = {}
    for name in ("1", "2", "3"):
        become(replica, versions[name])
        body = ask(replica)
        assert body["system_fingerprint"] == f"{name}-{name}00000000000"
        found[body["system_fingerprint"]] = body["choices"][0]["text"]
    assert len(set(found.values())) == 3
    return found


def test_no_request_fails_and_every_answer_is_of_one_version_while_versions_change(replica, versions, texts):
    async def scene():
        stop = asyncio.Event()
        answers = []

        async def hammer(index):
            async with client_of(replica) as client:
                while not stop.is_set():
                    body = await complete(client, max_tokens=12 if index % 2 else 5)
                    answers.append((body["system_fingerprint"], body["choices"][0]["text"], index % 2))

        clients = [asyncio.create_task(hammer(index)) for index in range(8)]
        for name in ("1", "2", "3", "1", "2"):
            await asyncio.to_thread(become, replica, versions[name])
            await asyncio.sleep(0.15)
        stop.set()
        await asyncio.gather(*clients)
        return answers

    answers = run(scene())
    assert {fingerprint for fingerprint, _, _ in answers} == set(texts)
    for fingerprint, text, is_whole in answers:
        assert text == texts[fingerprint] if is_whole else texts[fingerprint].startswith(text)
    health = ask(replica, "/health")
    assert health["compiles_while_serving"] == 0
    assert health["version"] == "2"


def test_a_stream_says_its_version_in_every_event(replica, versions, texts):
    become(replica, versions["3"])

    async def scene():
        async with client_of(replica) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", **ASK, "stream": True})
            return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    events = run(scene())
    assert {event["system_fingerprint"] for event in events} == {"3-300000000000"}


def test_the_way_back_reads_nothing_and_takes_no_time(replica, versions, texts, tmp_path):
    moved = tmp_path / "2"
    shutil.copytree(versions["2"], moved)
    first, second = become(replica, versions["1"]), settings_of(moved)
    replica.reconfigure(config_of(second))
    assert ask(replica)["system_fingerprint"].startswith("2-")
    shutil.rmtree(versions["1"] / "params")
    try:
        started = time.monotonic()
        replica.reconfigure(config_of(first))
        assert time.monotonic() - started < ROLLBACK_SECONDS
        body = ask(replica)
        assert texts[body["system_fingerprint"]] == body["choices"][0]["text"]
        assert body["system_fingerprint"].startswith("1-")
    finally:
        save_parameters(versions["1"] / "params", random_leaves(seed=0))


def damaged(directory):
    next((directory / "params").rglob("manifest.ocdbt")).write_bytes(b"not a manifest")


def of_another_vocabulary(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(40)])
    tokenizer.save(str(directory / "tokenizer.json"))


def of_a_wrong_dtype(directory):
    leaves = random_leaves(seed=1)
    name = next(iter(leaves))
    shutil.rmtree(directory / "params")
    save_parameters(directory / "params", {**leaves, name: leaves[name].astype("int32")})


def of_a_wrong_shape(directory):
    leaves = random_leaves(seed=1)
    name = next(name for name, leaf in leaves.items() if leaf.ndim == 2)
    shutil.rmtree(directory / "params")
    save_parameters(directory / "params", {**leaves, name: leaves[name][:-1]})


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (damaged, "cannot be read"),
        (of_another_vocabulary, "vocabulary"),
        (of_a_wrong_dtype, "dtype: .* is int32"),
        (of_a_wrong_shape, "shape: "),
    ],
)
def test_a_version_that_cannot_be_had_is_named_and_the_old_one_serves(
    replica, versions, texts, tmp_path, break_it, words
):
    become(replica, versions["1"])
    bad = tmp_path / "4"
    shutil.copytree(versions["2"], bad)
    break_it(bad)
    wanted = config_of(settings_of(bad))
    with pytest.raises(ArtifactError, match=words):
        replica.prepare(wanted)
    replica.reconfigure(wanted)  # must not raise: Ray Serve would end the process
    assert replica.describe()["refused"]
    assert texts[ask(replica)["system_fingerprint"]] == ask(replica)["choices"][0]["text"]
    become(replica, versions["2"])
    assert replica.describe()["refused"] is None


def test_what_does_not_fit_into_memory_is_refused_with_arithmetic(replica, versions, monkeypatch):
    become(replica, versions["1"])
    monkeypatch.setattr("psutil.virtual_memory", lambda: dataclasses.make_dataclass("M", ["available"])(2**20))
    with pytest.raises(ParameterError, match=r"are available"):
        replica.prepare(config_of(settings_of(versions["3"])))
    assert ask(replica)["system_fingerprint"].startswith("1-")


def test_a_first_configuration_that_cannot_be_had_ends_the_process(tmp_path):
    with pytest.raises(ArtifactError):
        Replica().reconfigure(config_of(settings_of(tmp_path)))


def test_other_settings_get_an_engine_of_their_own_and_the_old_one_finishes_its_requests(replica, versions, texts):
    become(replica, versions["1"])
    wanted = settings_of(versions["2"], context=96, slots=1)
    assert replica.prepare(config_of(wanted), beside=False) == {"tiny": "restart: its settings differ"}

    async def scene():
        async with client_of(replica) as client:
            asked = [asyncio.create_task(complete(client, max_tokens=40)) for _ in range(6)]
            await asyncio.sleep(0.02)
            await asyncio.to_thread(replica.reconfigure, config_of(wanted))
            late = await complete(client)
            return await asyncio.gather(*asked), late

    early, late = run(scene())
    assert all(body["usage"]["completion_tokens"] > 0 for body in early)
    assert late["system_fingerprint"].startswith("2-")
    assert ask(replica, "/health")["context_tokens"] == 96
    become(replica, versions["1"])


def test_models_come_and_go_beside_each_other(replica, versions, texts):
    one, other = settings_of(versions["1"]), settings_of(versions["2"], name="other", slots=1)
    replica.reconfigure(config_of(one, other))
    assert [model["id"] for model in ask(replica, "/v1/models")["data"]] == ["tiny", "other"]
    assert ask(replica)["system_fingerprint"].startswith("1-")
    assert ask(replica, model="other")["system_fingerprint"].startswith("2-")
    replica.reconfigure(config_of(one))
    assert list(ask(replica, "/health")["models"]) == ["tiny"]


def test_a_configuration_survives_json_and_names_are_unique(versions):
    config = ReplicaConfig(models=(settings_of(versions["1"], dimensions={"width": 4}),), traffic={"canary": 10})
    assert read_config(json.loads(json.dumps(config.as_json()))) == config
    with pytest.raises(ParameterError, match="each needs a name"):
        read_config(config_of(settings_of(versions["1"]), settings_of(versions["2"])))
    with pytest.raises(ParameterError, match="another version of this package"):
        read_config({"models": [{"name": "tiny"}]})
