"""What a rank holds while it trains, and how it is set up.

Owns the way from a job to a sharded model, an optimizer and a checkpointer. Knows nothing of steps. The one decision:
everything that can be refused (batch arithmetic, precision, vocabulary, reductions) is refused here, before step 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.checkpoint.stateful import Stateful

from pipeline.artifacts.store import Store, open_store
from pipeline.errors import ParameterError
from pipeline.training.checkpoints.checkpoint import Checkpointer, has_commits, start_generation
from pipeline.training.checkpoints.consensus import Consensus
from pipeline.training.checkpoints.interval import save_interval
from pipeline.training.checkpoints.rng import seed_rank
from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.faults.guard import GUARD_EXTRA, Guard, make_watchdog
from pipeline.training.faults.out_of_memory import noted_rows
from pipeline.training.faults.watchdog import Watchdog
from pipeline.training.parallel.cutting import cut_model
from pipeline.training.parallel.mesh import Mesh, MeshPlan, make_mesh
from pipeline.training.parallel.pipeline import PipelineModel
from pipeline.training.parallel.placement import order_of_ranks
from pipeline.training.parallel.sharding import check_reductions
from pipeline.training.precision import SUPPORT, capability_of, check_precision
from pipeline.training.speed import Speedometer, peak_flops_of
from pipeline.training.start.weights import StartingWeights
from pipeline.training.tasks.language_task import LanguageTask
from pipeline.training.tasks.loss import cross_entropy_sum
from pipeline.training.tasks.memory_check import Room, activation_warning, check_memory
from pipeline.training.tasks.memory_count import count_parameters, describe_parameters
from pipeline.training.tasks.model import plan_run
from pipeline.training.tasks.module_task import ModuleTask
from pipeline.training.tasks.same_data import check_same_data
from pipeline.training.tasks.starting import fill_model, start_model
from pipeline.training.tasks.task import Task
from pipeline.training.unit_count import UnitCount
from pipeline.training.updates.average import AVERAGE_EXTRA, WeightAverage
from pipeline.training.updates.float8 import use_float8
from pipeline.training.updates.groups import freeze
from pipeline.training.updates.loss_scale import LossScale
from pipeline.training.updates.optimizer import Stages, build_optimizer
from pipeline.training.updates.refusals import check_updates
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
    open_initial: Callable[[], StartingWeights] | None = None
    """Opens the weights that training starts from, in the rank's own process."""
    project_root: str = "."
    """Where the user's own modules are."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rank, ready to step."""

    worker: WorkerContext
    config: TrainConfig
    plan: BatchPlan
    mesh: Mesh
    task: Task
    model: nn.Module
    parameters: list[nn.Parameter]
    """Those that are trained."""
    optimizer: optim.Optimizer
    average: WeightAverage | None
    """Where the config has `ema`."""
    loss_scale: LossScale | None
    """In float16."""
    checkpointer: Checkpointer
    guard: Guard
    speed: Speedometer
    units: UnitCount
    room: Room
    """The memory there is, and what of it is taken for certain."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have been written with to be gone on from: the config's, and the dataset's digest."""
        return {**self.config.identity(), "dataset": self.task.data_digest}

    @property
    def mesh_plan(self) -> MeshPlan:
        """Sizes of the mesh's axes."""
        return self.mesh.plan

    @property
    def stages(self) -> Stages | None:
        """Where the model is cut into a pipeline; what is tied counts on its first stage."""
        if not isinstance(self.model, PipelineModel):
            return None
        is_copy = self.model.is_last
        return Stages(group=self.model.group, counted_elsewhere=self.model.tied_copy if is_copy else None)


def open_session(worker: WorkerContext, job: TrainJob, *, watchdog: Watchdog | None = None) -> Session:
    """Build, shard and check everything; called by all ranks inside the process group.

    Args:
        worker: this rank.
        job: what is trained.
        watchdog: the one that watches already; one that does not watch where it is None.

    Raises:
        ParameterError: the batch does not divide, the precision cannot be computed here, model and dataset do not
            fit, or what training holds for certain does not fit into memory.
        ClusterError: reductions of this backend are wrong, or others hold the memory.
    """
    store = open_store(job.workspace)
    job = _within_memory(job, store, worker)
    config = job.config
    check_precision(config.precision, device=worker.device, capability=capability_of(worker.torch_device))
    check_schedule(config)
    task, mesh_plan, plan = make_task(job, world_size=worker.world_size)
    check_same_data(task.data_digest, worker)
    mesh = make_mesh(worker, mesh_plan, order=order_of_ranks(worker, mesh_plan))
    worker = replace(worker, dealt=mesh.share)
    weights = None if job.open_initial is None else job.open_initial()
    resumes = has_commits(store, worker)
    room = _described_room(task, config, batch=plan, mesh=mesh, worker=worker, weights=weights, warns=not resumes)
    model, matrices, room = _sharded_model(task, config, worker=worker, mesh=mesh, weights=weights, room=room)
    held_on = torch.device("cpu") if config.offload == "all" else worker.torch_device
    fill_model(model, config, weights=weights, device=held_on, resumes=resumes)
    seed_rank(worker, seed=config.seed, step=0)
    optimizer = build_optimizer(model, config, matrices=matrices)
    average = None if config.ema is None else WeightAverage(model, decay=config.ema.decay)
    loss_scale, units = LossScale() if SUPPORT[config.precision].scales_loss else None, UnitCount()
    guard = _guard(worker, config, store=store, watchdog=watchdog)
    extras = _present({AVERAGE_EXTRA: average, "loss_scale": loss_scale, "units": units, GUARD_EXTRA: guard})
    return Session(
        worker=worker,
        config=config,
        plan=plan,
        mesh=mesh,
        task=task,
        model=model,
        parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        optimizer=optimizer,
        average=average,
        loss_scale=loss_scale,
        checkpointer=Checkpointer(
            store=store,
            model=model,
            optimizer=optimizer,
            extras=extras,
            must_resume=resumes,
            generation=guard.heart.generation,
            companions=task.companions,
            **_saving(config, worker),
        ),
        guard=guard,
        speed=_speedometer(worker, config, plan=plan, flops=task.flops_per_unit(room.num_parameters)),
        units=units,
        room=room,
    )


def _described_room(
    task: Task,
    config: TrainConfig,
    *,
    batch: BatchPlan,
    mesh: Mesh,
    worker: WorkerContext,
    weights: StartingWeights | None,
    warns: bool,
) -> Room | None:
    """Hold a language model against memory before it is built, and before a mesh changes how its layers compute.

    None for a module of the user's own: what it has is known when it is made.
    """
    if isinstance(config.model, str):
        return None
    size = describe_parameters(task, config)
    room = check_memory(size, config, mesh=mesh.plan, worker=worker, is_drawn=weights is None)
    if not (warns and worker.is_first):
        return room
    warning = activation_warning(task, config, mesh=mesh.plan, batch=batch, room=room, on_gloo=worker.device == "cpu")
    return replace(room, warning=warning)


def _guard(worker: WorkerContext, config: TrainConfig, *, store: Store, watchdog: Watchdog | None) -> Guard:
    return Guard.open(
        worker,
        store,
        faults=config.faults,
        watchdog=watchdog or make_watchdog(worker, faults=config.faults, preemption=config.preemption),
        generation=start_generation(store, worker),
    )


def _present(extras: Mapping[str, Stateful | None]) -> dict[str, Stateful]:
    """Those that this run has."""
    return {name: extra for name, extra in extras.items() if extra is not None}


def _saving(config: TrainConfig, worker: WorkerContext) -> dict[str, Any]:
    """Fields of a checkpointer that the config and the rank decide."""
    return {
        "worker": worker,
        "keep": config.keep_checkpoints,
        "in_background": config.checkpoint_async,
        "interval": save_interval(config, num_devices=worker.world_size),
        "timeout_seconds": config.checkpoint_timeout_seconds,
        "trained_only": config.lora is not None,
    }


def _speedometer(worker: WorkerContext, config: TrainConfig, *, plan: BatchPlan, flops: float | None) -> Speedometer:
    peak = peak_flops_of(worker, precision=config.precision)
    return Speedometer(
        units_per_step=plan.units_per_step,
        flops_per_unit=flops,
        peak_flops=None if peak is None else peak * worker.world_size,
    )


def _within_memory(job: TrainJob, store: Store, worker: WorkerContext) -> TrainJob:
    """The job with the micro-batches that an earlier start came down to, where it ran out of memory; as rank 0 reads.

    Raises:
        ParameterError: micro-batches may shrink, and the model is one whose result depends on them.
    """
    config = job.config
    if config.faults.out_of_memory != "smaller_micro_batch":
        return job
    if isinstance(config.model, str):
        raise ParameterError(
            "faults.out_of_memory: smaller_micro_batch is for models that do not depend on how a step is cut; "
            f"{config.model!r} may normalize by the rows of one pass",
            hint="set `out_of_memory: stop`, and `micro_batch_sequences` to what fits",
        )
    asked_rows = config.micro_batch_sequences
    rows = Consensus(worker=worker).from_first(lambda: noted_rows(store, asked_rows=asked_rows))
    return replace(job, config=replace(config, micro_batch_sequences=rows))


def _sharded_model(
    task: Task,
    config: TrainConfig,
    *,
    worker: WorkerContext,
    mesh: Mesh,
    weights: StartingWeights | None,
    room: Room | None,
) -> tuple[nn.Module, frozenset[str], Room]:
    """The model on the mesh, after reductions were seen to be right; its hidden matrices; the memory.

    A module of the user's own may do anything when it is made, so it is made once, and held against memory after that.
    """
    check_reductions(worker, mesh.fsdp)
    model = start_model(task, config, weights=weights)
    blocks = task.blocks(model)
    matrices = check_updates(model, blocks, config)
    freeze(model, config.freeze)
    if room is None:
        room = check_memory(count_parameters(model, blocks), config, mesh=mesh.plan, worker=worker, is_drawn=False)
    if config.precision == "float8":
        use_float8(model, blocks)
    task.prepare(model, config)
    if config.compile:
        for block in blocks:
            block.compile(fullgraph=False, dynamic=False)
    model = cut_model(model, mesh, blocks=blocks, config=config, worker=worker, loss=cross_entropy_sum)
    model.train()
    return model, matrices, room


def make_task(job: TrainJob, *, world_size: int) -> tuple[Task, MeshPlan, BatchPlan]:
    """What is trained on what, on which mesh, and how a step of it is cut.

    Raises:
        ParameterError: axes or batch do not divide, or model and dataset do not fit.
    """
    config, dataset = job.config, job.open_dataset()
    task: Task
    if isinstance(config.model, str):
        task, length = ModuleTask(config, dataset, project_root=job.project_root), None
    else:
        task, length = LanguageTask(config, dataset), dataset.sequence_length
    return task, *plan_run(config, sequence_length=length, world_size=world_size)
