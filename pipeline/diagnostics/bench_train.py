"""`pipeline bench train`: the training loop against a bare FSDP2 loop.

Owns the comparison. The bare loop is what a careful person writes by hand: the same model, sharding, optimizer, batch
and clipping, and nothing else. The one decision: both run in the same processes in turns, so that whatever else the
machine does meets both, and ours is charged with its reports, its checks, and its share of a checkpoint at the default
cadence, though none falls into a measured round.
"""

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.sources import STDLIB, read_documents
from pipeline.data.split import choose, split
from pipeline.diagnostics.bench_result import BenchResult, BenchRow, machine_facts
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.config import TrainConfig
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import advance, initial_state
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.tasks.model import read_model_config
from pipeline.training.worker import WorkerContext, joined

BAR = 0.95
_TEXT_BYTES = 2_000_000
_TIMEOUT_SECONDS = 1800.0
_CHECKPOINT_EVERY_STEPS = 50
"""The default of `train.fsdp`."""
_TURN_STEPS = 2
"""Steps of one loop before the other has its turn. With whole rounds in turns, load of other processes moved the ratio
between 0.97 and 1.24 on a machine of two cores."""
_UNBOUNDED_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _StdlibText:
    source: str = STDLIB
    json_field: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Seconds of each measured round of one rank, and of one checkpoint."""

    ours: tuple[float, ...]
    bare: tuple[float, ...]
    checkpoint_seconds: float


def run(
    *,
    rounds: int = 5,
    steps: int = 8,
    world_size: int = 2,
    model: Path | None = None,
    global_batch_tokens: int = 4096,
    micro_batch_sequences: int = 8,
    sequence_length: int = 256,
    vocabulary_size: int = 4096,
) -> BenchResult:
    """Measure steady tokens per second of both loops, on CPU ranks with one thread each.

    Args:
        rounds: measured rounds of each loop, after one that warms up; medians are compared.
        steps: optimizer steps in a round.
        world_size: ranks.
        model: transformers config file; the shipped 8 M Llama when None.
        global_batch_tokens: tokens in a step over all ranks.
        micro_batch_sequences: rows in a forward pass of a rank.
        sequence_length: tokens in a row.
        vocabulary_size: of the tokenizer that is trained for the bench.
    """
    config_file = model or Path(__file__).resolve().parents[2] / "configs" / "models" / "llama-8m.json"
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as scratch:
        dataset_path = Path(scratch, "dataset")
        dataset_path.mkdir()
        _write_text(dataset_path, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
        config = TrainConfig(
            model=read_model_config(config_file),
            steps=_UNBOUNDED_STEPS,
            global_batch_tokens=global_batch_tokens,
            micro_batch_sequences=micro_batch_sequences,
            learning_rate=1e-3,
            checkpoint_every_steps=_UNBOUNDED_STEPS,
            validate_every_steps=_UNBOUNDED_STEPS,
            validation_sequences=world_size,
        )
        job = TrainJob(
            config=config,
            workspace=str(Path(scratch, "workspace")),
            open_dataset=functools.partial(PackedDataset.open, dataset_path, verify=False),
        )
        per_rank = spawn(_measure, job, rounds, steps, world_size=world_size, timeout_seconds=_TIMEOUT_SECONDS)
    return _judge(
        per_rank[0], step_tokens=global_batch_tokens, steps=steps, world_size=world_size, model_name=config_file.stem
    )


def _judge(measured: Rounds, *, step_tokens: int, steps: int, world_size: int, model_name: str) -> BenchResult:
    checkpoint_share = measured.checkpoint_seconds * steps / _CHECKPOINT_EVERY_STEPS
    tokens = step_tokens * steps
    row = BenchRow(
        name=f"train {model_name}, {world_size} ranks, {step_tokens} tokens a step",
        unit="tokens/s",
        ours=tokens / (statistics.median(measured.ours) + checkpoint_share),
        peer_name="bare FSDP2 loop",
        peer=tokens / statistics.median(measured.bare),
        bar=BAR,
    )
    machine = machine_facts() | {
        "torch": torch.__version__,
        "checkpoint_seconds": round(measured.checkpoint_seconds, 3),
        "rounds": len(measured.ours),
        "steps_per_round": steps,
    }
    return BenchResult(machine=machine, rows=(row,))


def _write_text(directory: Path, *, sequence_length: int, vocabulary_size: int) -> None:
    documents = choose(read_documents(_StdlibText(), directory), seed=0, max_documents=None, max_bytes=_TEXT_BYTES)
    plan = PackingPlan(vocabulary_size=vocabulary_size, sequence_length=sequence_length, shard_tokens=1_048_576, seed=0)
    write_dataset(split(documents, seed=0, validation_fraction=0.05), directory, plan=plan, source={"source": STDLIB})


def _measure(worker: WorkerContext, job: TrainJob, rounds: int, steps: int) -> Rounds:
    """One rank: rounds of both loops in turns, the first round not counted, then one checkpoint."""
    with joined(worker):
        session = open_session(worker, job)
        reporter = BufferedReporter()
        state = initial_state(session, reporter)
        bare = BareLoop(session)
        ours_seconds: list[float] = []
        bare_seconds: list[float] = []

        def ours(count: int) -> None:
            nonlocal state
            state = replace(state, step=taken)
            state, _ = advance(session, reporter, state=state, until=taken + count)

        taken = 0
        for _ in range(rounds + 1):
            ours_seconds.append(0.0)
            bare_seconds.append(0.0)
            for first in range(0, steps, _TURN_STEPS):
                count = min(_TURN_STEPS, steps - first)
                turns = [(ours, ours_seconds), (bare.advance, bare_seconds)]
                for loop, seconds in turns if first // _TURN_STEPS % 2 == 0 else reversed(turns):
                    seconds[-1] += _timed(functools.partial(loop, count))
                taken += count
        checkpoint_seconds = _timed(lambda: session.checkpointer.save(state))
    return Rounds(ours=tuple(ours_seconds[1:]), bare=tuple(bare_seconds[1:]), checkpoint_seconds=checkpoint_seconds)


def _timed(act: Callable[[], Any]) -> float:
    """Seconds of `act` between two barriers."""
    dist.barrier()
    started = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - started


class BareLoop:
    """FSDP2 by hand: no session, no reports, no checks, no checkpoints."""

    def __init__(self, like: Session) -> None:
        config, plan, worker = like.config, like.plan, like.worker
        self._rows_per_micro_batch = plan.rows_per_micro_batch
        self._accumulation = plan.accumulation
        self._rows = like.task.rows
        self._plan, self._worker = plan, worker
        self._step = 0
        torch.manual_seed(0)
        assert not isinstance(config.model, str)
        self._model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config.model), dtype=torch.float32, attn_implementation="sdpa"
        )
        mesh = init_device_mesh(worker.device, (worker.world_size,), mesh_dim_names=("shard",))
        for block in self._model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: math.exp(-step / 1e6))

    def advance(self, steps: int) -> None:
        """Take optimizer steps."""
        for _ in range(steps):
            rows = self._rows(self._step, plan=self._plan, worker=self._worker, seed=0)
            tokens = torch.from_numpy(rows).to(self._worker.torch_device, dtype=torch.int64)
            for micro in range(self._accumulation):
                first = micro * self._rows_per_micro_batch
                chunk = tokens[first : first + self._rows_per_micro_batch]
                logits = self._model(input_ids=chunk[:, :-1], use_cache=False).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].reshape(-1))
                (loss / self._accumulation).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self._step += 1
