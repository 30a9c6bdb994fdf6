"""A stage's context without a runner: a packed dataset of real text and a tiny checkpoint in its language."""

import json
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.data.document import Document
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import split
from pipeline.stages.parameters import Parameters
from pipeline.stages.protocol import InputArtifact, Resources, StageContext
from pipeline.stages.reporting import BufferedReporter

SEQUENCE_LENGTH = 32
VOCABULARY = 300


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the standard library, packed."""
    directory = tmp_path_factory.mktemp("dataset")
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("bisect.py", "heapq.py", "keyword.py", "contextvars.py", "token.py", "stat.py", "copy.py", "queue.py")
    documents = [Document(name=name, text=(library / name).read_text(encoding="utf-8")) for name in names]
    plan = PackingPlan(vocabulary_size=VOCABULARY, sequence_length=SEQUENCE_LENGTH, shard_tokens=10_000, seed=0)
    write_dataset(split(documents, seed=0, validation_fraction=0.3), directory, plan=plan, source={"source": "stdlib"})
    return directory


@pytest.fixture
def tiny_checkpoint(tmp_path: Path, tiny_dataset: Path) -> Path:
    """What a training stage commits: `dcp/`, `config.json`, `tokenizer.json`."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    state = {"model": model.state_dict(), "optimizer": {"exp_avg": torch.zeros(3)}}
    dcp.save(state, checkpoint_id=directory / "dcp", no_dist=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    (directory / "tokenizer.json").write_bytes((tiny_dataset / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture
def stage_context(tmp_path: Path) -> Callable[..., StageContext[Any]]:
    """`stage_context(parameters, {"checkpoint": path, ...})`."""

    def make(parameters: Parameters, inputs: Mapping[str, Path]) -> StageContext[Any]:
        return StageContext(
            run_id="run",
            flow="flow",
            stage="stage",
            attempt=1,
            fingerprint="fingerprint",
            parameters=parameters,
            inputs={
                name: InputArtifact(
                    stage=name, output=name, path=path, fingerprint="f", digest=f"digest-{name}", run_id="r", metrics={}
                )
                for name, path in inputs.items()
            },
            output_root=tmp_path / "outputs",
            workspace=str(tmp_path / "workspace"),
            project_root=tmp_path,
            resources=Resources(),
            reporter=BufferedReporter(),
            deadline=None,
        )

    return make
