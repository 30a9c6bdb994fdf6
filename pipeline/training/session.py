"""What a rank holds while it trains, and how it is set up.

Owns the way from a job to a sharded model, an optimizer and a checkpointer. Knows nothing of steps. The one decision:
everything that can be refused (batch arithmetic, precision, vocabulary, reductions) is refused here, before step 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from pipeline.artifacts.store import open_store
from pipeline.training.checkpoints.checkpoint import Checkpointer, seed_rank, start_generation
from pipeline.training.config import BatchPlan, TrainConfig, plan_batch
from pipeline.training.parallel.mesh import MeshPlan, make_mesh, plan_mesh
from pipeline.training.parallel.sharding import check_precision, check_reductions, shard_model
from pipeline.training.speed import Speedometer, peak_flops_of
from pipeline.training.tasks.language_task import LanguageTask
from pipeline.training.tasks.model import num_parameters
from pipeline.training.tasks.module_task import ModuleTask
from pipeline.training.tasks.task import Task
from pipeline.training.updates.optimizer import build_adamw
from pipeline.training.updates.schedule import check_schedule
from pipeline.training.worker import WorkerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """What a launcher carries to every rank; must pickle."""

    config: TrainConfig
    workspace: str
    """Path or fsspec URL that every rank can write, where checkpoints live."""
    open_dataset: Callable[[], Any]
    """Opens the dataset in the rank's own process: `TokenRows` for a language model, else `ArrayRows`."""
    project_root: str = "."
    """Where the user's own modules are."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rank, ready to step."""

    worker: WorkerContext
    config: TrainConfig
    plan: BatchPlan
    mesh_plan: MeshPlan
    task: Task
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
    check_schedule(config)
    task, plan = make_task(job, world_size=worker.world_size)

    mesh_plan = plan_mesh(config.parallel, world_size=worker.world_size, shard_group=config.shard_group)
    model, count = _sharded_model(task, config, worker=worker, mesh_plan=mesh_plan)
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
        companions=task.companions,
    )
    peak = peak_flops_of(worker, precision=config.precision)
    speed = Speedometer(
        units_per_step=plan.units_per_step,
        flops_per_unit=task.flops_per_unit(count),
        peak_flops=None if peak is None else peak * worker.world_size,
    )
    return Session(
        worker=worker,
        config=config,
        plan=plan,
        mesh_plan=mesh_plan,
        task=task,
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        checkpointer=checkpointer,
        speed=speed,
        num_parameters=count,
    )


def _sharded_model(
    task: Task, config: TrainConfig, *, worker: WorkerContext, mesh_plan: MeshPlan
) -> tuple[nn.Module, int]:
    """The model on the mesh, after reductions were seen to be right, and its number of parameters."""
    mesh = make_mesh(worker, mesh_plan)
    check_reductions(worker, mesh)
    model = task.build(seed=config.seed)
    count = num_parameters(model)
    blocks = task.blocks(model)
    task.prepare(model, config)
    if config.compile:
        for block in blocks:
            block.compile(fullgraph=False, dynamic=False)
    shard_model(
        model,
        mesh,
        blocks=blocks,
        precision=config.precision,
        reshard_after_forward=mesh_plan.reshards_after_forward,
    )
    return model, count


def make_task(job: TrainJob, *, world_size: int) -> tuple[Task, BatchPlan]:
    """What is trained on what, and how a step of it is cut.

    Raises:
        ParameterError: the batch does not divide, or model and dataset do not fit.
    """
    config, dataset = job.config, job.open_dataset()
    if isinstance(config.model, str):
        plan = plan_batch(config, sequence_length=None, world_size=world_size)
        return ModuleTask(config, dataset, project_root=job.project_root), plan
    plan = plan_batch(config, sequence_length=dataset.sequence_length, world_size=world_size)
    return LanguageTask(config, dataset), plan
