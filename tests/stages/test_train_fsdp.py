"""`train.fsdp` as the runner calls it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig, LlamaForCausalLM

from converters.starting_weights import open_weights
from pipeline.artifacts.manifest import FileEntry, sha256_of
from pipeline.artifacts.store import open_store
from pipeline.errors import ParameterError
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.protocol import Resources
from pipeline.stages.registry import KINDS
from pipeline.stages.train_fsdp import NOT_CONFIG, export_checkpoint, run
from pipeline.training.checkpoints.commit import AttemptKey, CheckpointCommit, commit, write_vote
from pipeline.training.config import TrainConfig

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def train_context(stage_context, tiny_dataset: Path, tmp_path: Path):
    def make(*, model: dict[str, Any] | None = MODEL, resources: Resources | None = None, **fields: Any):
        (tmp_path / "model.json").write_text(json.dumps(model))
        given = {
            "dataset": "${stages.data.outputs.dataset}",
            "model": None if model is None else "model.json",
            "steps": 4,
            "global_batch_tokens": 256,
            "micro_batch_sequences": 2,
            "validation_sequences": 3,
            "warmup_steps": 1,
            "log_every_steps": 1,
        }
        context = stage_context(TrainFsdpParameters(**(given | fields)), {"dataset": tiny_dataset})
        return replace(context, resources=resources or Resources(workers=2, cpus=0.5, gpus=0.0))

    return make


def test_every_parameter_is_read_by_the_loop_or_by_the_stage() -> None:
    config_fields = set(TrainConfig.__dataclass_fields__)
    assert set(TrainFsdpParameters.model_fields) == (config_fields - {"model"}) | NOT_CONFIG


def test_a_checkpoint_that_a_resume_has_fetched_is_handed_on_whole(tmp_path: Path) -> None:
    store, output = open_store(f"memory://{tmp_path.name}"), tmp_path / "checkpoint"
    key = AttemptKey.new(step=1, generation=1)
    store.write(f"{key.prefix}/state.json", b"{}")
    entry = FileEntry(path="state.json", size=2, sha256=hashlib.sha256(b"{}").hexdigest())
    write_vote(store, key, rank=0, files=(entry,))
    made = commit(store, key, world_size=1)
    store.local_path(key.prefix, names=["state.json"])
    export_checkpoint(store, made, output)
    store.forget_local(key.prefix)
    assert sorted(path.name for path in output.iterdir()) == ["COMMIT.json", "state.json"]
    assert CheckpointCommit.from_json((output / "COMMIT.json").read_bytes(), where="here") == made


@pytest.mark.ray
def test_it_hands_on_the_final_committed_checkpoint(ray_cluster, train_context, tmp_path: Path) -> None:
    context = train_context()
    result = run(context)
    directory = context.output_root / "checkpoint"
    assert {path.name for path in directory.iterdir()} == {
        "dcp",
        "config.json",
        "tokenizer.json",
        "state.json",
        "COMMIT.json",
    }
    commit = json.loads((directory / "COMMIT.json").read_text())
    for entry in commit["files"]:
        if (directory / entry["path"]).exists():
            assert sha256_of(directory / entry["path"]) == entry["sha256"]
    stored = dcp.FileSystemReader(str(directory / "dcp")).read_metadata().state_dict_metadata
    assert "model.model.embed_tokens.weight" in stored
    others = {"validation_accuracy", "examples_per_second", "num_examples"}  # of arrays
    others |= {"ema_validation_loss", "ema_validation_accuracy"}
    assert set(result.metrics) == set(KINDS["train.fsdp"].default_metrics) - others
    assert result.metrics["steps"] == 4
    assert result.metrics["num_tokens"] == 4 * 256
    assert result.facts["device"] == "cpu"
    assert result.facts["backend"] == "gloo"
    assert result.facts["world_size"] == 2
    assert result.facts["device_reason"].startswith("auto: no GPU")
    steps = {report.step for report in context.reporter.drain() if report.kind == "metrics"}
    assert steps == {0, 1, 2, 3, 4}


@pytest.mark.ray
def test_adapters_on_weights_that_exist_come_out_as_a_plain_model(
    ray_cluster, train_context, tiny_dataset: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    LlamaForCausalLM(AutoConfig.for_model(**MODEL)).save_pretrained(base)
    (base / "tokenizer.json").write_bytes((tiny_dataset / "tokenizer.json").read_bytes())
    context = train_context(model=None, initial="base", lora={"rank": 2}, learning_rate=1e-2, steps=2)
    result = run(context)
    directory = context.output_root / "checkpoint"
    assert {path.name for path in directory.iterdir()} == {
        "adapter",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "state.json",
        "tokenizer.json",
    }
    assert result.metrics["validation_loss_change"] < 0
    ours, theirs = open_weights(str(directory)), open_weights(str(base))
    assert ours.shapes == theirs.shapes
    changed = {name for name in ours.shapes if not np.array_equal(ours.read(name), theirs.read(name))}
    assert len(changed) == 2 * 7
    assert all("_proj" in name for name in changed)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"device": "cuda"}, "device: cuda, but no GPU is reserved"),
        ({"device": "cuda", "resources": Resources(workers=2, gpus=1.0)}, "no GPU is available"),
        ({"precision": "bfloat16"}, "bfloat16 needs CUDA"),
        ({"precision": "float8"}, "float8 needs CUDA"),
        ({"freeze": ["atention"]}, "freeze: 'atention' matches no parameter; near it .*self_attn|post_attention"),
        ({"parameter_groups": [{"match": "embeds"}]}, "'embeds' matches no parameter; near it .*embed_tokens"),
        ({"lora": {}, "compile": True, "activation_checkpointing": "selective"}, "compile: true with activation_check"),
        ({"freeze": ["s.0", "embed"], "mesh": {"pipeline": 2}}, r"nothing to train on rank 0 of .* \(blocks 0"),
        ({"global_batch_tokens": 100}, "global_batch_tokens 100 is no multiple"),
        ({"model": MODEL | {"vocab_size": 250}}, "the dataset's vocabulary has 300 tokens, the model's vocab_size is"),
        ({"model": MODEL | {"max_position_embeddings": 16}}, "max_position_embeddings is 16"),
        ({"model": MODEL | {"model_type": "lama"}}, "did you mean 'llama'"),
        ({"document_masks": True, "mesh": {"context": 2}}, "document_masks with mesh context 2"),
        ({"model_arguments": {"width": 3}}, "is a config file, which has no factory"),
        ({"loss": "mean_squared_error"}, "is trained by cross entropy"),
    ],
)
def test_what_cannot_work_is_refused_before_a_worker_starts(
    ray_cluster, train_context, tmp_path: Path, fields, found: str
) -> None:
    with pytest.raises(ParameterError, match=found) as caught:
        run(train_context(**fields))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "workspace").exists()
