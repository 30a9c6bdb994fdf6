"""What `pipeline bench train` trains: a model's config and rows of real text.

Owns the dataset of a bench and the job that every side gets. Knows nothing of what is measured. The one decision: rows
are written once a run, from the source text of the standard library, which every machine has.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.sources import STDLIB, read_documents
from pipeline.data.split import choose, split
from pipeline.diagnostics.bench_result import BenchRow
from pipeline.training.config import TrainConfig
from pipeline.training.session import TrainJob
from pipeline.training.tasks.model import read_model_config

WORLD_SIZE = 2
UNBOUNDED_STEPS = 1_000_000
CHECKPOINT_EVERY_STEPS = 50
"""The default of `train.fsdp`."""
_MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "llama-8m.json"
_TEXT_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a group found."""

    rows: tuple[BenchRow, ...]
    details: tuple[Mapping[str, str], ...] = ()
    """`row`, `part`, `figure`: what a row is made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StdlibText:
    source: str = STDLIB
    json_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class Material:
    """Of one run of the bench; the defaults are those of `flows/llm.yaml`."""

    work: Path
    """Scratch directory of this run."""
    rounds: int = 5
    notice: Callable[[str], None] = lambda _: None
    model: Path = _MODEL
    sequence_length: int = 256
    vocabulary_size: int = 4096
    global_batch_tokens: int = 2048
    micro_batch_sequences: int = 4
    turn_steps: int = 2
    """Steps of one side before the next has its turn."""
    world_size: int = field(default=WORLD_SIZE, init=False)

    @cached_property
    def dataset(self) -> Path:
        """Packed rows, written when they are first asked for."""
        directory = self.work / "dataset"
        directory.mkdir(parents=True)
        documents = choose(read_documents(_StdlibText(), directory), seed=0, max_documents=None, max_bytes=_TEXT_BYTES)
        plan = PackingPlan(
            vocabulary_size=self.vocabulary_size, sequence_length=self.sequence_length, shard_tokens=1_048_576, seed=0
        )
        parts = split(documents, seed=0, validation_fraction=0.05)
        write_dataset(parts, directory, plan=plan, source={"source": STDLIB})
        return directory

    def job(self, name: str, **fields: Any) -> TrainJob:
        """A job in a workspace of its own; `fields` are those of `TrainConfig`."""
        given: dict[str, Any] = {
            "model": read_model_config(self.model),
            "steps": UNBOUNDED_STEPS,
            "global_batch_tokens": self.global_batch_tokens,
            "micro_batch_sequences": self.micro_batch_sequences,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "checkpoint_every_steps": UNBOUNDED_STEPS,
            "validate_every_steps": UNBOUNDED_STEPS,
            "validation_sequences": self.world_size,
        }
        return TrainJob(
            config=TrainConfig(**(given | fields)),
            workspace=str(self.work / name),
            open_dataset=functools.partial(PackedDataset.open, self.dataset, verify=False),
        )
