"""Ranks as Ray Train workers.

Owns the launch of a gang through Ray Train v2, the way of rank 0's reports to the stage, and the meaning of a failed
gang. Knows nothing of steps: each worker calls the same loop that plain processes call. The one decision: Ray places
and restarts ranks, and nothing more; what a restarted gang continues from is decided by the commit protocol, and an
error that no restart can mend is written down by the rank that met it first, so the gang does not train again for it.
"""

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from pipeline.artifacts.store import open_store
from pipeline.errors import ClusterError, FailureClass, PipelineError
from pipeline.training.device import DeviceChoice
from pipeline.training.failure import LostContactError, as_pipeline_error, read_fatal, record_fatal
from pipeline.training.loop import TrainResult, train
from pipeline.training.reporter import Reporter, SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.worker import COLLECTIVE_TIMEOUT_SECONDS, WorkerContext, backend_of

_PUSH_SECONDS = 0.5
_LAST_PUSH_SECONDS = 30.0
_SETTINGS = {
    # The controller asks for the ranks' state so often; with Ray's 2 s a finished gang is noticed 1 s late on average.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Each of these saves the start of a process or a thread that nothing here reads.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ranks stay in the directory of the project, where the user's modules are.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class DrainedReporter(Reporter, Protocol):
    """A reporter that keeps what it is told; `pipeline.stages.reporting.BufferedReporter` is one."""

    def drain(self) -> list[Any]:
        """Everything reported since the last call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """What the ranks are and what each asks of the cluster."""

    num_workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    device: DeviceChoice
    max_worker_failures: int
    """Restarts of the whole gang."""
    num_threads: int
    """Threads of torch operators in a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """What every rank is given."""

    job: TrainJob
    gang: Gang
    launch_id: str
    make_reporter: Callable[[], DrainedReporter]
    receiver: Any
    """Handle of the actor whose `push_reports` takes reports."""


def cluster_gpus() -> float:
    """GPUs of the connected cluster, taken or free."""
    return float(ray.cluster_resources().get("GPU", 0.0))


def train_on_ray(
    job: TrainJob,
    *,
    gang: Gang,
    make_reporter: Callable[[], DrainedReporter],
    deliver: Callable[[Sequence[Any]], None],
) -> TrainResult:
    """Train on Ray Train workers of the connected cluster; blocks until training is done.

    Args:
        job: what is trained; its dataset and workspace must be readable from every node.
        gang: ranks and resources.
        make_reporter: makes rank 0's reporter in rank 0's process.
        deliver: takes rank 0's reports after training where this process is no actor; in an actor they arrive live
            through its method `push_reports`.

    Raises:
        PipelineError: what the first failing rank raised.
        ClusterError: workers died more often than `max_worker_failures`, or could not be placed.
    """
    receiver, is_own = _report_receiver()
    launch = _Launch(job=job, gang=gang, launch_id=secrets.token_hex(6), make_reporter=make_reporter, receiver=receiver)
    try:
        with (
            _environment(_SETTINGS),
            _own_interrupts(),
            tempfile.TemporaryDirectory(prefix="pipeline-ray-train-") as storage,
        ):
            result = _trainer(launch, storage).fit()
        value = result.return_value
    except TrainingFailedError as error:
        raise _meaning(error, launch) from error
    except RayError as error:
        raise ClusterError(f"Ray could not run the training controller: {error}") from error
    finally:
        if is_own:
            deliver(ray.get(receiver.drain.remote()))
            ray.kill(receiver)
    fatal = read_fatal(open_store(job.workspace), launch.launch_id)
    if fatal is not None:
        raise fatal
    if not isinstance(value, TrainResult):
        raise ClusterError(f"rank 0 ended without a result: {value!r}")
    return value


def _trainer(launch: _Launch, storage: str) -> TorchTrainer:
    gang = launch.gang
    resources = {"CPU": gang.cpus_per_worker}
    if gang.gpus_per_worker > 0:
        resources["GPU"] = gang.gpus_per_worker
    return TorchTrainer(
        _enter_rank,
        # As bytes, because the controller unpickles this too: its own import of transformers took 3 s of every launch.
        train_loop_config={"launch": cloudpickle.dumps(launch)},
        scaling_config=ScalingConfig(
            num_workers=gang.num_workers, use_gpu=gang.gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=f"train-{launch.launch_id}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=gang.max_worker_failures, controller_failure_limit=0),
        ),
        torch_config=TorchConfig(backend=backend_of(gang.device.device), timeout_s=int(COLLECTIVE_TIMEOUT_SECONDS)),
    )


def _enter_rank(config: dict[str, Any]) -> TrainResult | None:
    """The process boundary of a rank: train, report, and write down an error that a restart cannot mend."""
    launch: _Launch = cloudpickle.loads(config["launch"])
    store = open_store(launch.job.workspace)
    if read_fatal(store, launch.launch_id) is not None:
        return None
    worker = _worker_context(launch.gang)
    try:
        with _reporting(launch, worker) as reporter:
            return train(worker, launch.job, reporter=reporter)
    except Exception as error:  # the boundary: whatever a rank raises is classified here
        meant = as_pipeline_error(error, rank=worker.rank)
        if meant.failure_class is not FailureClass.INFRA:
            record_fatal(store, launch.launch_id, meant)
        raise meant from error


def _worker_context(gang: Gang) -> WorkerContext:
    context = get_context()
    is_cuda = gang.device.device == "cuda"
    return WorkerContext(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=int(get_device().index or 0) if is_cuda else context.get_local_rank(),
        device=gang.device.device,
        device_reason=gang.device.reason,
        num_threads=gang.num_threads,
    )


@contextmanager
def _reporting(launch: _Launch, worker: WorkerContext) -> Iterator[Reporter]:
    """Rank 0's reporter, pushed to the receiver from a thread of its own; silence on other ranks."""
    if not worker.is_first:
        yield SilentReporter()
        return
    reporter = launch.make_reporter()
    ended = threading.Event()

    def push() -> None:
        while not ended.wait(_PUSH_SECONDS):
            reports = reporter.drain()
            if reports:
                launch.receiver.push_reports.remote(reports)

    thread = threading.Thread(target=push, name="push-reports", daemon=True)
    thread.start()
    try:
        yield reporter
    finally:
        ended.set()
        thread.join()
        ray.get(launch.receiver.push_reports.remote(reporter.drain()), timeout=_LAST_PUSH_SECONDS)


class _Receiver:
    """Keeps reports where the launching process is no actor."""

    def __init__(self) -> None:
        self._reports: list[Any] = []

    def push_reports(self, reports: Sequence[Any]) -> None:
        """Keep them."""
        self._reports.extend(reports)

    def drain(self) -> list[Any]:
        """Everything kept."""
        return self._reports


def _report_receiver() -> tuple[Any, bool]:
    """An actor that takes reports, and whether it was made here."""
    if ray.get_runtime_context().get_actor_id() is not None:
        return ray.get_runtime_context().current_actor, False
    return ray.remote(num_cpus=0)(_Receiver).remote(), True


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, for as long as the launch lasts; Ray Train hands them on."""
    mine = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Put back the SIGINT handler that Ray Train replaces in a main thread; its own keeps the controller alive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _meaning(error: TrainingFailedError, launch: _Launch) -> PipelineError:
    """What a failed gang is to the user: the first fatal error, else the death of a rank, else what a rank raised."""
    fatal = read_fatal(open_store(launch.job.workspace), launch.launch_id)
    if fatal is not None:
        return fatal
    if isinstance(error, ControllerError):
        return ClusterError(
            f"Ray Train could not run the workers: {error.controller_failure}",
            hint="compare the stage's resources with what the cluster has free",
        )
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    tried = f"after {launch.gang.max_worker_failures} restarts"
    dead = sorted(rank for rank, failure in failures.items() if _is_death(failure))
    if dead:
        return ClusterError(
            f"rank {', '.join(map(str, dead))} of {launch.gang.num_workers} died {tried}: {failures[dead[0]]}",
            hint="look for the out-of-memory killer or a lost node; committed checkpoints are kept and resumed from",
        )
    raised = [error for rank in sorted(failures) if isinstance(error := _raised(failures[rank]), PipelineError)]
    raised.sort(key=lambda item: isinstance(item, LostContactError))
    if raised:
        return raised[0]
    return ClusterError(f"training failed {tried}: {error}")


def _is_death(failure: BaseException) -> bool:
    inner = getattr(failure, "health_check_failure", failure)
    return isinstance(inner, RayActorError)


def _raised(failure: BaseException) -> BaseException:
    """The exception of the rank inside Ray Train's wrapping."""
    return getattr(failure, "_base_exc", None) or failure
