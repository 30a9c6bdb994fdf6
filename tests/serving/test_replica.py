"""A replica is ready when its constructor returns, and says what is wrong otherwise."""

import dataclasses
import json
import subprocess
import sys
import uuid

import pytest
from tokenizers import Tokenizer

from pipeline.errors import ArtifactError, ClusterError, ParameterError, StageError
from pipeline.models.decoders.readers import read_decoder
from pipeline.serving.accelerator.device import choose_placement
from pipeline.serving.accelerator.memory import memory_need, why_too_big
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.hosting.stop_tokens import stop_ids_of
from pipeline.serving.replica_settings import ReplicaSettings
from pipeline.serving.rollout.ray_serve import own_error, replica_error


def settings_of(path, **given):
    return ReplicaSettings(
        **{
            "name": "tiny",
            "model_path": str(path),
            "digest": "abc",
            "version": "1",
            "deployment_id": uuid.uuid4().hex,
            "slots": 2,
            "context": 128,
            "prefill_chunk_tokens": 16,
            "decode_steps": 2,
            **given,
        }
    )


def test_a_tokenizer_of_another_model_is_refused(model_directory):
    with pytest.raises(ArtifactError, match=r"vocabulary has 100"):
        read_tokenizer(model_directory, num_tokens=100)
    assert isinstance(read_tokenizer(model_directory, num_tokens=320), Tokenizer)


@pytest.mark.parametrize("text", ["", "{", '{"model": 3}'])
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: cannot be read"):
        read_tokenizer(tmp_path, num_tokens=10)


def test_stop_tokens_come_from_the_config():
    assert stop_ids_of({}) == () and stop_ids_of({"eos_token_id": None}) == ()
    assert stop_ids_of({"eos_token_id": 2}) == (2,) and stop_ids_of({"eos_token_id": [2, 5]}) == (2, 5)


def test_placement_says_what_it_chose_and_why():
    _, placement = choose_placement(device="auto", dtype="auto")
    assert (placement.device, placement.dtype) == ("cpu", "float32")
    assert "auto" in placement.device_reason and "bfloat16" in placement.dtype_reason
    with pytest.raises(ParameterError, match="sees only cpu"):
        choose_placement(device="cuda", dtype="auto")


def test_memory_counts_every_number_of_the_model(model, model_directory):
    config = read_decoder(json.loads((model_directory / "config.json").read_text()))
    from pipeline.models.checkpoint import model_leaves

    assert config.num_parameters == sum(leaf.size for leaf in model_leaves(model).values())
    need = memory_need(config, dtype="bfloat16", slots=4, context=100, device="cuda")
    assert need.weights == 2 * config.num_parameters
    assert need.cache == 2 * (4 * 100 * 2 * 2 * 2 * 16)
    assert why_too_big(need, available=2**40, replicas=1, slots=4, context=100) is None
    assert "4 slots x 100 tokens" in why_too_big(need, available=2**20, replicas=1, slots=4, context=100)


def test_a_replica_serves_from_its_directory_and_a_second_start_hits_the_compile_cache(model_directory, tmp_path):
    """In a process of its own, as under Ray Serve: jax's cache settings are the process's."""
    script = tmp_path / "start.py"
    script.write_text(
        "import sys, json, time\n"
        "from pipeline.serving.hosting.replica import Replica\n"
        "from pipeline.serving.replica_settings import ReplicaSettings\n"
        "replica = Replica.of(ReplicaSettings(**json.loads(sys.argv[1])))\n"
        "print(json.dumps(replica.only.facts))\n"
        "replica.check_health()\n"
        "replica.stop()\n"
    )
    cache = tmp_path / "cache"
    fields = json.dumps(dataclasses.asdict(settings_of(model_directory, compilation_cache=str(cache), slots=1)))

    def start():
        done = subprocess.run([sys.executable, str(script), fields], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    facts = start()
    assert facts["digest"] == "abc" and facts["device"] == "cpu" and facts["context_tokens"] == 128
    written = {path.name for path in cache.rglob("*-cache")}
    assert len(written) >= facts["num_executables"]
    start()
    assert {path.name for path in cache.rglob("*-cache")} == written


SERVE_TEXT = """The deployment failed to start 1 times in a row. See controller logs for details. Error:
ray::ServeReplica:tiny:engine.initialize_and_get_metadata()
  File "x.py", line 3, in f
    raise ValueError("first")
ValueError: first

The above exception was the direct cause of the following exception:

  File "y.py", line 4, in g
pipeline.errors.ArtifactError: /store/params: cannot be read as an Orbax checkpoint: cut
  hint: the files are missing
"""


def test_the_replicas_own_error_comes_first_and_keeps_its_class():
    assert own_error(SERVE_TEXT)[0] == "ArtifactError"
    error = replica_error("tiny", SERVE_TEXT)
    assert isinstance(error, ArtifactError)
    assert str(error).startswith("/store/params: cannot be read")
    assert "still serves" in error.hint
    foreign = replica_error("tiny", "Traceback\nXlaRuntimeError: RESOURCE_EXHAUSTED")
    assert isinstance(foreign, StageError) and str(foreign).startswith("XlaRuntimeError: RESOURCE_EXHAUSTED")
    assert not isinstance(replica_error("tiny", "no traceback here"), ClusterError)
