"""What `pipeline bench train` measures on a Ray cluster.

Owns the start of a gang against Ray Train as it comes, and the recovery of one. The one decision: both sides of the
start run on the same head in turns, and count from the call to the first line of rank 0's function.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from pipeline.cluster import ray_connection
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.diagnostics.bench_train_recovery import recovery_job, recovery_rows
from pipeline.diagnostics.bench_turns import Figures, RowSpec, make_row, take_turns
from pipeline.diagnostics.ray_bench_mark import leave_mark
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.device import DeviceChoice
from pipeline.training.launch.outage import record
from pipeline.training.launch.ray_elastic import make_policy
from pipeline.training.launch.ray_gang import GangRequest, Host, run_gang
from pipeline.training.launch.ray_train import Gang, train_on_ray
from pipeline.training.session import TrainJob

START_BAR = 1.0
_ROUNDS = 2
_START_SECONDS = 60.0
_OURS, _EMPTY, _RAY = "ours", "empty", "ray"
_ENTRY, _RETURN = "entry_seconds", "return_seconds"
_CPUS = 0.5


def measure(material: Material, *, address: str) -> Measured:
    """Start and recovery, on the head at `address`."""
    ray_connection.connect(address, verbose=False)
    try:
        start = _start(material)
        job = recovery_job(material, "recovery-on-ray")
        reports, _ = _train(job, max_worker_failures=1)
        recovery = recovery_rows(reports, name="recovery, Ray")
    finally:
        ray_connection.disconnect()
    return Measured(rows=start.rows + recovery.rows, details=start.details + recovery.details)


def _start(material: Material) -> Measured:
    def ours(number: int) -> Figures:
        job = material.job(f"start-{number}", steps=1, checkpoint_every_steps=1)
        asked_at = time.time()
        reports, entered_at = _train(job, max_worker_failures=0)
        returned_at = time.time()
        return {_ENTRY: entered_at - asked_at, _RETURN: returned_at - max(report.time for report in reports)}

    def plain(number: int) -> Figures:
        mark = material.work / f"plain-start-{number}"
        asked_at = time.time()
        TorchTrainer(
            leave_mark,
            train_loop_config={"mark": str(mark)},
            scaling_config=ScalingConfig(num_workers=material.world_size, resources_per_worker={"CPU": _CPUS}),
            run_config=RunConfig(storage_path=str(material.work / "plain-storage")),
        ).fit()
        entered_at = float(mark.read_text())
        # The function does nothing, so its end is its beginning.
        return {_ENTRY: entered_at - asked_at, _RETURN: time.time() - entered_at}

    def empty(number: int) -> Figures:
        mark = material.work / f"empty-start-{number}"
        # As the stage's process, which stands before it asks for a gang.
        host = ray.remote(num_cpus=0, max_concurrency=2)(Host).options(name=f"bench-gang-{number}").remote()
        ray.get(host.drain.remote())
        asked_at = time.time()
        ray.get(host.run.remote(cloudpickle.dumps(_empty_gang(material, mark, workspace=str(material.work)))))
        returned_at, entered_at = time.time(), float(mark.read_text())
        ray.kill(host)
        return {_ENTRY: entered_at - asked_at, _RETURN: returned_at - entered_at}

    measured = take_turns({_OURS: ours, _EMPTY: empty, _RAY: plain}, rounds=_ROUNDS, warm_up=False)
    peers = {_RAY: "TorchTrainer with Ray's defaults"}
    specs = [
        RowSpec(
            name=f"start on Ray, {shown}",
            unit="s",
            ours=side,
            metric=metric,
            peers=peers,
            bar=bar,
            is_smaller_better=True,
        )
        for shown, side, metric, bar in (
            ("a function that does nothing, to its first line", _EMPTY, _ENTRY, START_BAR),
            ("a function that does nothing, from its end", _EMPTY, _RETURN, START_BAR),
            # The peer's function is empty here too: the difference is the import of what training needs.
            ("training, to its first line", _OURS, _ENTRY, None),
            ("training, from its last report", _OURS, _RETURN, None),
        )
    ]
    return Measured(rows=tuple(make_row(spec, measured=measured) for spec in specs))


def _empty_gang(material: Material, mark: Path, *, workspace: str) -> Callable[[], Any]:
    request = GangRequest(
        name=mark.name,
        enter=cloudpickle.dumps(functools.partial(leave_mark, {"mark": str(mark)})),
        min_workers=material.world_size,
        max_workers=material.world_size,
        resources_per_worker={"CPU": _CPUS},
        labels={},
        max_failures=0,
        start_timeout_seconds=_START_SECONDS,
        health_timeout_seconds=_START_SECONDS,
        make_way=b"",
        record_outage=functools.partial(record, workspace),
    )
    sizes = (material.world_size,)
    policy = functools.partial(
        make_policy, sizes=sizes, start_timeout_seconds=_START_SECONDS, workspace=workspace, last_step=0
    )
    return functools.partial(run_gang, request, make_policy=policy)


def _train(job: TrainJob, *, max_worker_failures: int) -> tuple[list[Report], float]:
    """Everything that rank 0 reported, and when its reporter was first made, in seconds since the epoch."""
    reports: list[Report] = []
    gang = Gang(
        sizes=(2,),
        cpus_per_worker=_CPUS,
        gpus_per_worker=0.0,
        device=DeviceChoice(device="cpu", reason="the bench is about CPU ranks"),
        max_worker_failures=max_worker_failures,
        num_threads=1,
    )
    train_on_ray(job, gang=gang, make_reporter=_stamped, deliver=reports.extend)
    return reports, min(report.time for report in reports)


def _stamped() -> BufferedReporter:
    """Made in rank 0's process before training begins."""
    reporter = BufferedReporter()
    reporter.note("rank 0 is here")
    return reporter
