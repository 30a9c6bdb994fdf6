"""A tiny model and a tiny dataset of real text, and one rank inside the test's own process."""

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.document import Document
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import split
from pipeline.training.config import TrainConfig
from pipeline.training.launch.spawn import free_port
from pipeline.training.session import TrainJob
from pipeline.training.worker import WorkerContext

SEQUENCE_LENGTH = 16
TINY_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def token_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed dataset of a few standard library files, rows of 16 tokens."""
    directory = tmp_path_factory.mktemp("rows")
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("bisect.py", "heapq.py", "keyword.py", "token.py", "stat.py", "copy.py", "queue.py", "sched.py")
    documents = [Document(name=name, text=(library / name).read_text(encoding="utf-8")) for name in names]
    plan = PackingPlan(vocabulary_size=300, sequence_length=SEQUENCE_LENGTH, shard_tokens=50_000, seed=0)
    write_dataset(split(documents, seed=0, validation_fraction=0.2), directory, plan=plan, source={})
    return directory


@pytest.fixture
def make_job(token_rows: Path, tmp_path: Path) -> Callable[..., TrainJob]:
    """`make_job(steps=6, workspace=..., open_dataset=..., **fields of TrainConfig)`."""

    def make(*, workspace: str | Path | None = None, open_dataset: Any = None, **fields: Any) -> TrainJob:
        given = {
            "model": TINY_MODEL,
            "steps": 6,
            "global_batch_tokens": 8 * SEQUENCE_LENGTH,
            "micro_batch_sequences": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "checkpoint_every_steps": 3,
            "checkpoint_async": False,  # a rank that is killed leaves what it has saved, and not by chance
            "validate_every_steps": 3,
            "validation_sequences": 7,
            "log_every_steps": 1,
        }
        return TrainJob(
            config=TrainConfig(**(given | fields)),
            workspace=str(workspace or tmp_path / "workspace"),
            open_dataset=open_dataset or functools.partial(PackedDataset.open, token_rows),
        )

    return make


@pytest.fixture
def one_rank() -> WorkerContext:
    """The only rank of a world of one, in this process."""
    return WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        device_reason="a test",
        store_address=f"127.0.0.1:{free_port()}",
        num_threads=1,
    )
