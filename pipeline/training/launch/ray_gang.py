"""A gang of Ray Train workers with as few processes around it as Ray Train allows.

Owns what is asked of Ray Train: its controller, the callbacks, the meeting point of the ranks, the name of their
placement group, and when each of these was there. Imports no torch and knows nothing of training; what the workers run
comes as bytes. The one decision: the controller runs in the process of the stage, which has Ray loaded already. Ray
Train would start actors for the controller, for a cleaner and for a coordinator of data sets, one after the other,
before the first worker.
"""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray._private.state import state as cluster_state
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import AcceleratorSetupCallback, BackendSetupCallback
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.placement_group import placement_group

from pipeline.cluster.ray_placement import group_name
from pipeline.errors import PreemptedError

GANG_VARIABLE = "PIPELINE_GANG"
"""In a worker: the gang as JSON, see `Meeting`."""
DRAIN_LOOK_SECONDS = 1.0
SETTINGS = {
    # The controller asks for the ranks' state so often; with Ray's 2 s a finished gang is noticed 1 s late on average.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    # Each of these saves the start of a process or a thread that nothing here reads.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # The controller lives in the stage's process, whose log is the attempt's.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # Ranks stay in the directory of the project, where the user's modules are.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GangRequest:
    """What is asked of Ray Train."""

    name: str
    enter: bytes
    """A pickled function without arguments; each worker calls it, and what rank 0 returns is handed back pickled."""
    min_workers: int
    max_workers: int
    resources_per_worker: Mapping[str, float]
    labels: Mapping[str, str]
    """Of the nodes that workers may be on."""
    max_failures: int
    """Restarts after a worker failed; a gang that grows, or leaves a node that drains, uses none up."""
    start_timeout_seconds: float
    """For the placement of the workers."""
    health_timeout_seconds: float
    """A worker that answers no health check for so long is dead."""
    make_way: bytes
    """A pickled function of a reason; called in every worker when a node of one of them drains."""
    record_outage: Callable[[float, float], None]
    """Called with when a failure was noticed and when its workers were gone, in seconds since the epoch."""
    prepare: bytes = b""
    """A pickled function without arguments; called in the main thread of every worker, which no rank runs in. Nothing
    where it is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What each rank is told before it starts."""

    store_address: str
    """Where rank 0 makes the TCP store, `host:port`."""
    placed_at: float
    """When all workers were there, in seconds since the epoch by the clock of the controller."""

    @classmethod
    def here(cls) -> "Meeting":
        """Of the gang that this process is a worker of."""
        return cls(**json.loads(os.environ[GANG_VARIABLE]))


@dataclass(frozen=True, kw_only=True, slots=True)
class GangEnd:
    """How a gang ended."""

    value: bytes | None
    """Pickled, what rank 0 returned."""
    error: TrainingFailedError | None
    placed_at: float
    """As the last start's `Meeting` says; 0 where there was none."""


class Starts(WorkerGroupCallback, ControllerCallback):
    """Tells ranks where they meet, and writes down when a gang was lost."""

    def __init__(self, record_outage: Callable[[float, float], None], *, prepare: bytes) -> None:
        self.placed_at = 0.0
        self._asked_at = time.time()
        self._noticed_at: float | None = None
        self._record_outage = record_outage
        self._prepare = prepare

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """A failure was noticed; the first one counts until a gang runs again."""
        if self._noticed_at is None:
            self._noticed_at = time.time()

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """A gang is asked for; the workers of the one before still stand, failed ones too."""
        if self.placed_at:
            self._asked_at = time.time()

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """The old workers are gone."""
        self._record_outage(self._noticed_at or self._asked_at, time.time())
        self._noticed_at = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        """All workers are there."""
        self.placed_at = time.time()
        host, port = worker_group.execute_single(0, get_address_and_port)
        meeting = {
            "store_address": f"{host}:{port}",
            "placed_at": self.placed_at,
        }
        worker_group.execute(_learn, json.dumps(meeting), self._prepare)


class Drains(WorkerGroupCallback):
    """Asks ranks to make way when a node of theirs is to go.

    Ray Train has an actor for this, which looks every 5 s; the controller looks by itself, at the price of one question
    to the cluster a second.
    """

    def __init__(self, make_way: bytes) -> None:
        self._make_way = make_way
        self._group: Any = None
        self._has_asked = False
        self._looked_at = 0.0

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Watch these workers."""
        self._group, self._has_asked = worker_group, False

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Look for drains of their nodes; each gang is asked once."""
        if self._group is None or time.monotonic() - self._looked_at < DRAIN_LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        draining = set(cluster_state.get_draining_nodes())
        going = sorted(
            {worker.metadata.node_ip for worker in self._group.get_workers() if worker.metadata.node_id in draining}
        )
        if going:
            self._group.execute_async(_call, self._make_way, f"node {', '.join(going)} is drained")
            self._group, self._has_asked = None, True

    def excuse(self) -> bool:
        """True, once, where the gang that failed had been asked to make way."""
        has_asked, self._has_asked = self._has_asked, False
        return has_asked


class Restarts(DefaultFailurePolicy):
    """Ray Train's budget, which a gang that made way leaves untouched, also where its node went before it was done."""

    def __init__(self, failure_config: FailureConfig, *, drains: Drains) -> None:
        super().__init__(failure_config)
        self._drains = drains

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Start again where ranks ended because they were asked to."""
        if isinstance(training_failed_error, WorkerGroupError) and any(
            isinstance(getattr(one, "_base_exc", None) or one, PreemptedError)
            for one in training_failed_error.worker_failures.values()
        ):
            return FailureDecision.RETRY
        if isinstance(training_failed_error, WorkerGroupError) and self._drains.excuse():
            return FailureDecision.RETRY
        return super().make_decision(training_failed_error)


class RanksBackend(Backend):
    """Ranks join a process group themselves; Ray Train only shares the devices of a node among its ranks."""

    share_cuda_visible_devices = True


class RanksConfig(BackendConfig):
    """Of `RanksBackend`; unlike Ray Train's own for torch it loads no torch in the controller's process."""

    @property
    def backend_cls(self) -> type[Backend]:
        """See `BackendConfig`."""
        return RanksBackend


class NamedGroup(WorkerGroup):
    """Workers whose placement group has a name, by which it is found when its owner is gone."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> DefaultPlacementGroupHandle:
        return DefaultPlacementGroupHandle(
            placement_group(
                bundles=[worker_group_context.resources_per_worker] * worker_group_context.num_workers,
                strategy=worker_group_context.placement_strategy,
                name=group_name(ray.get_runtime_context().get_actor_name() or ""),
                bundle_label_selector=worker_group_context.label_selector,
            )
        )


class Controller(TrainController):
    """Ray Train's, with `NamedGroup`."""

    worker_group_cls = NamedGroup


class GangTrainer(DataParallelTrainer):
    """Ray Train's trainer, with its controller in this process."""

    def __init__(self, *, policy: ScalingPolicy, starts: Starts, drains: Drains, **settings: Any) -> None:
        super().__init__(_enter_worker, **settings)
        self._policy = policy
        self._starts = starts
        self._drains = drains

    def _create_default_callbacks(self) -> list[Any]:
        return [
            AcceleratorSetupCallback(self.backend_config, self.scaling_config),
            BackendSetupCallback(self.backend_config),
            self._starts,
            self._drains,
        ]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        restarts = Restarts(self.run_config.failure_config, drains=self._drains)
        controller = Controller(**{**settings, "scaling_policy": self._policy, "failure_policy": restarts})
        asyncio.run(controller.run())
        return controller.get_result()


def run_gang(request: GangRequest, *, make_policy: Callable[[ScalingConfig], ScalingPolicy]) -> GangEnd:
    """Run a gang to its end; blocks. The calling process must be an actor: workers get a handle to it.

    Args:
        request: what is asked.
        make_policy: decides how many workers a start has.
    """
    starts = Starts(request.record_outage, prepare=request.prepare)
    is_elastic = request.min_workers < request.max_workers
    scaling = ScalingConfig(
        num_workers=(request.min_workers, request.max_workers) if is_elastic else request.max_workers,
        use_gpu=request.resources_per_worker.get("GPU", 0.0) > 0,
        resources_per_worker=dict(request.resources_per_worker),
        label_selector=dict(request.labels) or None,
    )
    settings = {
        **SETTINGS,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{request.start_timeout_seconds:g}",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{request.health_timeout_seconds:g}",
    }
    with _environment(settings), tempfile.TemporaryDirectory(prefix="pipeline-ray-train-") as storage:
        failures = FailureConfig(
            max_failures=request.max_failures,
            # A start that finds its node gone is tried again where fewer workers may do; the policy's deadline ends it.
            controller_failure_limit=-1 if is_elastic else 0,
        )
        trainer = GangTrainer(
            policy=make_policy(scaling),
            starts=starts,
            drains=Drains(request.make_way),
            train_loop_config={"enter": request.enter},
            scaling_config=scaling,
            run_config=RunConfig(name=request.name, storage_path=storage, failure_config=failures),
            backend_config=RanksConfig(),
        )
        try:
            value = trainer.fit().return_value
        except TrainingFailedError as error:
            return GangEnd(value=None, error=error, placed_at=starts.placed_at)
    return GangEnd(value=value, error=None, placed_at=starts.placed_at)


def _enter_worker(config: dict[str, Any]) -> bytes:
    return cloudpickle.dumps(cloudpickle.loads(config["enter"])())


def _call(function: bytes, reason: str) -> None:
    cloudpickle.loads(function)(reason)


def _learn(meeting: str, prepare: bytes) -> None:
    os.environ[GANG_VARIABLE] = meeting
    if prepare:
        cloudpickle.loads(prepare)()


class Host:
    """The actor that runs a gang for a process that is no actor, and keeps what rank 0 reports."""

    def __init__(self) -> None:
        self._reports: list[Any] = []

    def run(self, function: bytes) -> Any:
        """Call a pickled function in this process."""
        return cloudpickle.loads(function)()

    def push_reports(self, reports: Sequence[Any]) -> None:
        """Keep them."""
        self._reports.extend(reports)

    def drain(self) -> list[Any]:
        """Everything kept."""
        return self._reports


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, for as long as the gang lasts; Ray Train hands them on."""
    mine = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
