"""What `pipeline bench train` measures on a Ray cluster.

Owns the start of a gang against Ray Train as it comes, and the recovery of one. The one decision: both sides of the
start run on the same head in turns, and count from the call to the first line of rank 0's function.
"""

import time
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

from pipeline.cluster import ray_connection
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.diagnostics.bench_train_recovery import recovery_job, recovery_rows
from pipeline.diagnostics.bench_turns import Figures, RowSpec, make_row, take_turns
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.device import DeviceChoice
from pipeline.training.launch.ray_train import Gang, train_on_ray
from pipeline.training.session import TrainJob

START_BAR = 1.0
_ROUNDS = 2
_OURS, _RAY = "ours", "ray"
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
            _note_times,
            train_loop_config={"mark": str(mark)},
            scaling_config=ScalingConfig(num_workers=material.world_size, resources_per_worker={"CPU": _CPUS}),
            run_config=RunConfig(storage_path=str(material.work / "plain-storage")),
        ).fit()
        entered_at = float(mark.read_text())
        # The function does nothing, so its end is its beginning.
        return {_ENTRY: entered_at - asked_at, _RETURN: time.time() - entered_at}

    measured = take_turns({_OURS: ours, _RAY: plain}, rounds=_ROUNDS, warm_up=False)
    peers = {_RAY: "TorchTrainer with Ray's defaults"}
    specs = [
        RowSpec(name=f"start on Ray, {shown}", unit="s", metric=metric, peers=peers, bar=bar, is_smaller_better=True)
        for shown, metric, bar in (("to the first line", _ENTRY, START_BAR), ("from the last report", _RETURN, None))
    ]
    return Measured(rows=tuple(make_row(spec, measured=measured) for spec in specs))


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


def _note_times(config: dict[str, Any]) -> None:
    """A function of ranks that does nothing but say when it was called."""
    if get_context().get_world_rank() == 0:
        Path(config["mark"]).write_text(str(time.time()))
