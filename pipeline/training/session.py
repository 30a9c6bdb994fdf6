"""What a rank holds while it trains, and how it is set up.

Owns the way from a job to a sharded model, an optimizer and a checkpointer. Knows nothing of steps. The one decision:
everything that can be refused (batch arithmetic, precision, vocabulary, reductions) is refused here, before step 1.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn, optim

from pipeline.artifacts.store import open_store
from pipeline.training.checkpoint import CONFIG_NAME, TOKENIZER_NAME, Checkpointer, seed_rank, start_generation
from pipeline.training.config import BatchPlan, TrainConfig, plan_batch
from pipeline.training.model import blocks_of, build_model, check_fits, flops_per_token, model_config, num_parameters
from pipeline.training.optimizer import build_adamw
from pipeline.training.rows import TokenRows
from pipeline.training.sharding import check_precision, check_reductions, make_mesh, shard_model
from pipeline.training.speed import Speedometer, peak_flops_of
from pipeline.training.worker import WorkerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """What a launcher carries to every rank; must pickle."""

    config: TrainConfig
    workspace: str
    """Path or fsspec URL that every rank can write, where checkpoints live."""
    open_dataset: Callable[[], TokenRows]
    """Opens the dataset in the rank's own process."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rank, ready to step."""

    worker: WorkerContext
    config: TrainConfig
    plan: BatchPlan
    dataset: TokenRows
    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: optim.Optimizer
    checkpointer: Checkpointer
    speed: Speedometer
    num_parameters: int


def open_session(worker: WorkerContext, job: TrainJob) -> Session:
    """Build, shard and check everything; called by all ranks inside the process group.

    Raises:
        ParameterError: the batch does not divide, the precision cannot be computed here, or model and dataset do not
            fit.
        ClusterError: reductions of this backend are wrong.
    """
    config = job.config
    check_precision(config.precision, device=worker.device)
    dataset = job.open_dataset()
    plan = plan_batch(config, sequence_length=dataset.sequence_length, world_size=worker.world_size)
    typed = model_config(config.model)
    check_fits(typed, vocabulary_size=dataset.vocabulary_size, sequence_length=dataset.sequence_length)

    mesh = make_mesh(worker)
    check_reductions(worker, mesh)
    model = build_model(typed, seed=config.seed)
    count = num_parameters(model)
    prepare_blocks(model, config)
    shard_model(model, mesh, precision=config.precision, reshard_after_forward=config.reshard_after_forward)
    model.train()
    seed_rank(worker, seed=config.seed, step=0)
    optimizer = build_adamw(model, config)

    store = open_store(job.workspace)
    checkpointer = Checkpointer(
        store=store,
        worker=worker,
        model=model,
        optimizer=optimizer,
        generation=start_generation(store, worker),
        keep=config.keep_checkpoints,
        companions={
            CONFIG_NAME: (json.dumps(typed.to_dict(), indent=2, sort_keys=True) + "\n").encode(),
            TOKENIZER_NAME: dataset.tokenizer_path.read_bytes(),
        },
    )
    peak = peak_flops_of(worker, precision=config.precision)
    speed = Speedometer(
        tokens_per_step=plan.tokens_per_step,
        flops_per_token=flops_per_token(typed, num_parameters=count, sequence_length=dataset.sequence_length),
        peak_flops=None if peak is None else peak * worker.world_size,
    )
    return Session(
        worker=worker,
        config=config,
        plan=plan,
        dataset=dataset,
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        checkpointer=checkpointer,
        speed=speed,
        num_parameters=count,
    )


def prepare_blocks(model: nn.Module, config: TrainConfig) -> None:
    """Recompute and compile blocks as the config says, in that order and before sharding."""
    if config.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        for block in blocks_of(model):
            block.compile(fullgraph=False, dynamic=False)
