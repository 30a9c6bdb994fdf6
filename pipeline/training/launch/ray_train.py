"""Ranks as Ray Train workers.

Owns the launch of a gang through Ray Train v2, the way of rank 0's reports to the stage, and the meaning of a failed
gang. Knows nothing of steps: each worker calls the same loop that plain processes call. The one decision: Ray places
and restarts ranks, and nothing more; what a restarted gang continues from is decided by the commit protocol, and an
error that no restart can mend is written down by the rank that met it first, so the gang does not train again for it.
"""

import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.train import get_context
from ray.train.torch import get_device
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.artifacts.store import open_store
from pipeline.errors import ClusterError, FailureClass, PipelineError, StoreError
from pipeline.training.device import DeviceChoice
from pipeline.training.failure import (
    RankFailure,
    as_pipeline_error,
    first_failure,
    read_failures,
    read_fatal,
    record_failure,
    record_fatal,
)
from pipeline.training.faults.last_words import set_channel
from pipeline.training.launch.outage import heed, make_way, record
from pipeline.training.launch.preflight import met
from pipeline.training.launch.ray_elastic import make_policy
from pipeline.training.launch.ray_gang import GangEnd, GangRequest, Host, Meeting, run_gang
from pipeline.training.loop import TrainResult, train
from pipeline.training.reporter import Reporter, SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.worker import WorkerContext

START_TIMEOUT_SECONDS = 60.0
PLACE_SECONDS = 10.0
"""An elastic gang is placed where room was seen; where a node is lost meanwhile, another size is tried after this."""
_PUSH_SECONDS = 0.5
_LAST_PUSH_SECONDS = 30.0
_COMMIT_PUSH_SECONDS = 5.0
"""A commit waits so long for a stage that takes no reports, and then goes without."""
_WORLDS = "worlds"


class DrainedReporter(Reporter, Protocol):
    """A reporter that keeps what it is told; `pipeline.stages.reporting.BufferedReporter` is one."""

    def drain(self) -> list[Any]:
        """Everything reported since the last call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """What the ranks are and what each asks of the cluster."""

    sizes: tuple[int, ...]
    """Numbers of ranks the gang may have, ascending; several where it is elastic."""
    cpus_per_worker: float
    gpus_per_worker: float
    device: DeviceChoice
    max_worker_failures: int
    """Restarts of the whole gang after a rank failed. A gang that grows uses none up."""
    num_threads: int
    """Threads of torch operators in a rank."""
    memory_per_worker: int = 0
    """Bytes that must be free on the node of a rank; 0 where nothing is asked."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """That a node must have to run a rank."""
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    """For a start to find room for its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangResult:
    """What a gang leaves."""

    training: TrainResult
    world_sizes: tuple[int, ...]
    """Of every start that worked in this workspace, of earlier attempts too."""


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
) -> GangResult:
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
    call = functools.partial(run_gang, _request(launch), make_policy=_policy(launch))
    try:
        end: GangEnd = ray.get(receiver.run.remote(cloudpickle.dumps(call))) if is_own else call()
    except RayError as error:
        raise ClusterError(f"Ray could not run the training controller: {error}") from error
    finally:
        if is_own:
            deliver(ray.get(receiver.drain.remote()))
            ray.kill(receiver)
    store = open_store(job.workspace)
    fatal = read_fatal(store, launch.launch_id)
    if fatal is not None:
        raise fatal
    if end.error is not None:
        raise _meaning(end.error, launch, start=_start_name(end.placed_at)) from end.error
    value = None if end.value is None else cloudpickle.loads(end.value)
    if not isinstance(value, TrainResult):
        raise ClusterError(f"rank 0 ended without a result: {value!r}")
    worlds = [int(name.rpartition("-")[2]) for name in store.list(_WORLDS)]
    return GangResult(training=value, world_sizes=tuple(worlds))


def _request(launch: _Launch) -> GangRequest:
    gang = launch.gang
    resources = {"CPU": gang.cpus_per_worker}
    if gang.gpus_per_worker > 0:
        resources["GPU"] = gang.gpus_per_worker
    if gang.memory_per_worker > 0:
        resources["memory"] = gang.memory_per_worker
    return GangRequest(
        name=f"train-{launch.launch_id}",
        enter=cloudpickle.dumps(functools.partial(_enter_rank, launch)),
        min_workers=gang.sizes[0],
        max_workers=gang.sizes[-1],
        resources_per_worker=resources,
        labels=gang.labels,
        max_failures=gang.max_worker_failures,
        start_timeout_seconds=min(gang.start_timeout_seconds, PLACE_SECONDS)
        if len(gang.sizes) > 1
        else gang.start_timeout_seconds,
        health_timeout_seconds=launch.job.config.faults.health_check_timeout_seconds,
        make_way=cloudpickle.dumps(make_way),
        record_outage=functools.partial(record, launch.job.workspace),
        prepare=cloudpickle.dumps(functools.partial(heed, launch.job.config.preemption.signals)),
    )


def _policy(launch: _Launch) -> Callable[..., Any]:
    return functools.partial(
        make_policy,
        sizes=launch.gang.sizes,
        start_timeout_seconds=launch.gang.start_timeout_seconds,
        workspace=launch.job.workspace,
        last_step=launch.job.config.steps,
    )


def _enter_rank(launch: _Launch) -> TrainResult | None:
    """The process boundary of a rank: train, report, and write down an error that a restart cannot mend."""
    store = open_store(launch.job.workspace)
    if read_fatal(store, launch.launch_id) is not None:
        return None
    meeting = Meeting.here()
    worker = _worker_context(launch.gang, meeting)

    def note(error: PipelineError) -> None:
        failure = RankFailure(rank=worker.rank, error=error, at=time.time())
        record_failure(store, launch.launch_id, start=_start_name(meeting.placed_at), failure=failure)

    set_channel(note)
    if worker.is_first:
        store.create(f"{_WORLDS}/{_start_name(meeting.placed_at)}-{worker.world_size}", b"")
    try:
        with _reporting(launch, worker) as (reporter, deliver):
            worker, found = met(worker, workspace=launch.job.workspace)
            reporter.note(str(found))
            return train(worker, launch.job, reporter=reporter, before_commit=deliver)
    except Exception as error:  # the boundary: whatever a rank raises is classified here
        meant = as_pipeline_error(error, rank=worker.rank)
        with suppress(StoreError):  # storage that is away is what it tells of, or no reason to hide what it does
            note(meant)
        if meant.failure_class is not FailureClass.INFRA:
            record_fatal(store, launch.launch_id, meant)
        raise meant from error


def _start_name(placed_at: float) -> str:
    """Of a start in the workspace; later ones are greater as texts."""
    return f"{placed_at:020.6f}"


def _worker_context(gang: Gang, meeting: Meeting) -> WorkerContext:
    context = get_context()
    is_cuda = gang.device.device == "cuda"
    return WorkerContext(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=int(get_device().index or 0) if is_cuda else context.get_local_rank(),
        device=gang.device.device,
        device_reason=gang.device.reason,
        store_address=meeting.store_address,
        num_threads=gang.num_threads,
    )


@contextmanager
def _reporting(launch: _Launch, worker: WorkerContext) -> Iterator[tuple[Reporter, Callable[[], None]]]:
    """Rank 0's reporter, pushed to the receiver from a thread of its own; silence on other ranks.

    The function beside it returns when everything reported so far has left the process, which may end right after.
    """
    if not worker.is_first:
        yield SilentReporter(), lambda: None
        return
    reporter = launch.make_reporter()
    ended, turn = threading.Event(), threading.Lock()

    def push() -> ray.ObjectRef:
        with turn:  # what another thread has drained is on its way then too
            return launch.receiver.push_reports.remote(reporter.drain())

    def push_often() -> None:
        while not ended.wait(_PUSH_SECONDS):
            push()

    def deliver() -> None:
        with suppress(RayError):
            ray.get(push(), timeout=_COMMIT_PUSH_SECONDS)

    thread = threading.Thread(target=push_often, name="push-reports", daemon=True)
    thread.start()
    try:
        yield reporter, deliver
    finally:
        ended.set()
        thread.join()
        ray.get(push(), timeout=_LAST_PUSH_SECONDS)


def _report_receiver() -> tuple[Any, bool]:
    """An actor that takes reports and runs the gang, and whether it was made here."""
    if ray.get_runtime_context().get_actor_id() is not None:
        return ray.get_runtime_context().current_actor, False
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"gang-{secrets.token_hex(6)}"
    host = ray.remote(num_cpus=0, max_concurrency=4)(Host).options(name=name, scheduling_strategy=here).remote()
    return host, True


def _meaning(error: TrainingFailedError, launch: _Launch, *, start: str) -> PipelineError:
    """What a failed gang is where no rank left a fatal error: the first failure of the start's ranks, or a death."""
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, PipelineError):
        return error.controller_failure
    if isinstance(error, ControllerError):
        return ClusterError(
            f"Ray Train could not run the workers: {error.controller_failure}",
            hint="compare the stage's resources with what the cluster has free",
        )
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    tried = f"after {launch.gang.max_worker_failures} restarts"
    found = read_failures(open_store(launch.job.workspace), launch.launch_id, start=start)
    noted = {failure.rank: failure for failure in found}
    for rank in sorted(failures.keys() - noted.keys()):
        if _is_death(failures[rank]):
            died = ClusterError(
                f"rank {rank} of {_sizes(launch.gang)} died {tried}: {failures[rank]}",
                hint="look for the out-of-memory killer or a lost node; committed checkpoints are resumed from",
            )
            noted[rank] = RankFailure(rank=rank, error=died, at=0.0)
    if noted:
        return first_failure(list(noted.values()))
    return ClusterError(f"training failed {tried}: {error}")


def _sizes(gang: Gang) -> str:
    return f"{gang.sizes[0]} to {gang.sizes[-1]}" if len(gang.sizes) > 1 else str(gang.sizes[0])


def _is_death(failure: BaseException) -> bool:
    inner = getattr(failure, "health_check_failure", failure)
    return isinstance(inner, RayActorError)
