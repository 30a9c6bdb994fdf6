"""The rows of recovery: a rank is killed, and what follows until the first step that is new.

Owns the kill and the reading of what training itself reports of it. Knows nothing of how a gang is restarted. The one
decision: the parts are those of `training.faults.recovery`; ours are all of them but `schedule`, in which processes
start, frameworks are imported and Ray places ranks, and that one is shown too.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pipeline.artifacts.store import open_store
from pipeline.diagnostics.bench_result import BenchRow
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.errors import StageError
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.faults.failpoints import VARIABLE
from pipeline.training.launch.spawn import respawn
from pipeline.training.loop import train
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.worker import WorkerContext

OWN_SECONDS = 3.0
STEPS = 12
CHECKPOINT_EVERY_STEPS = 4
KILLED_AT_STEP = 10
"""Two steps after a checkpoint."""
FAILPOINT = f"update@rank=1@step={KILLED_AT_STEP}@generation=1:kill"
_NOT_OURS = "rto_schedule_seconds"
_TIMEOUT_SECONDS = 300.0


def measure(material: Material) -> Measured:
    """Kill one of two plain processes."""
    job = recovery_job(material, "recovery")
    with _environment({VARIABLE: FAILPOINT}):
        reports = respawn(
            _train,
            job,
            store=open_store(job.workspace),
            max_restarts=1,
            world_size=material.world_size,
            timeout_seconds=_TIMEOUT_SECONDS,
        )[0]
    return recovery_rows(reports, name="recovery, plain processes")


def recovery_job(material: Material, name: str) -> TrainJob:
    """Short steps, so that a recovery is not hidden behind the steps that are taken again."""
    return material.job(
        name,
        steps=STEPS,
        global_batch_tokens=material.sequence_length * material.world_size,
        micro_batch_sequences=1,
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
        log_every_steps=1,
    )


def recovery_rows(reports: Sequence[Report], *, name: str) -> Measured:
    """The rows and parts of one recovery.

    Raises:
        StageError: training reports none, or a part is missing.
    """
    found = {
        key: value
        for report in reports
        if report.kind == "metrics"
        for key, value in report.payload.items()
        if key.startswith(("rto_", "rpo_"))
    }
    parts: Mapping[str, float] = {key: value for key, value in found.items() if key.startswith("rto_")}
    if _NOT_OURS not in parts or "rpo_steps" not in found:
        raise StageError(f"{name}: training reported {found or 'no recovery'}")
    own = sum(value for key, value in parts.items() if key != _NOT_OURS)
    rows = (
        BenchRow(
            name=f"{name}, our parts",
            unit="s",
            ours=own,
            peer_name="allowed",
            peer=OWN_SECONDS,
            bar=1.0,
            is_smaller_better=True,
        ),
        BenchRow(
            name=f"{name}, steps lost",
            unit="steps",
            ours=max(found["rpo_steps"], 1e-9),
            peer_name="checkpoint interval",
            peer=float(CHECKPOINT_EVERY_STEPS),
            bar=1.0,
            is_smaller_better=True,
        ),
    )
    details = [
        {"row": name, "part": key.removeprefix("rto_").removesuffix("_seconds"), "figure": f"{value:.2f} s"}
        for key, value in parts.items()
    ]
    return Measured(rows=rows, details=tuple(details))


def _train(worker: WorkerContext, job: TrainJob) -> list[Report]:
    reporter = BufferedReporter() if worker.is_first else None
    train(worker, job, reporter=reporter or SilentReporter())
    return [] if reporter is None else reporter.drain()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
