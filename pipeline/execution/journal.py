"""What happened in a run, one small object an event, so that any process can rebuild the state from storage alone.

Owns `runs/<run_id>/`: `run.json` (written once), `events/<number>.json`, and for each attempt `reports.jsonl` and
`output.log`. The one decision: an event carries a snapshot of what it changed, so that replaying is taking the last
snapshot of each stage, and a lost event costs a moment of history and nothing else.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.artifacts.store import Store
from pipeline.errors import ArtifactError, UsageError
from pipeline.spec.gate import GateVerdict
from pipeline.stages.protocol import Report
from pipeline.tracking.view import AttemptView, HopView, RunStatus, RunView, SeriesPoint, StageStatus, StageView

_NOT_IN_SNAPSHOT = ("series", "figures")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What is fixed when a run starts."""

    run_id: str
    flow: str
    flow_file: str
    flow_text: str
    """As the user wrote it: a rerun reads this, with the overrides."""
    resolved_text: str
    """With every parameter and default filled in."""
    overrides: tuple[str, ...]
    project_root: str
    parameters: Mapping[str, Any]
    host: str
    user: str
    pid: int
    started_at: float
    ephemeral: bool


def attempt_key(run_id: str, stage: str, attempt: int) -> str:
    """Key of what is kept of one attempt beside its artifact."""
    return f"runs/{run_id}/stages/{stage}/{attempt}"


class Journal:
    """Writes the events of one run; one writer at a time, held by the run's lease."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self._next = len(store.list(f"runs/{run_id}/events"))

    def begin(self, record: RunRecord) -> None:
        """Write the record of a new run."""
        if not self._store.create(f"runs/{self.run_id}/run.json", _encode(asdict(record))):
            raise ArtifactError(f"run {self.run_id} exists already")

    def run_event(self, status: RunStatus, *, time: float, error: str | None = None, tracking_gap: int = 0) -> None:
        """The run as a whole changed."""
        self._append({"time": time, "run": {"status": status, "error": error, "tracking_gap": tracking_gap}})

    def stage_event(self, stage: StageView, *, time: float) -> None:
        """A stage changed."""
        snapshot = {name: value for name, value in asdict(stage).items() if name not in _NOT_IN_SNAPSHOT}
        self._append({"time": time, "stage": snapshot})

    def write_reports(self, stage: str, attempt: int, reports: Sequence[Report]) -> None:
        """Everything an attempt reported so far."""
        lines = "".join(json.dumps(asdict(report)) + "\n" for report in reports)
        self._store.write(f"{attempt_key(self.run_id, stage, attempt)}/reports.jsonl", lines.encode())

    def _append(self, event: Mapping[str, Any]) -> None:
        while not self._store.create(f"runs/{self.run_id}/events/{self._next:06d}.json", _encode(event)):
            self._next += 1
        self._next += 1


def _encode(value: object) -> bytes:
    return json.dumps(value, indent=1, default=str).encode()


def list_runs(store: Store) -> list[str]:
    """Ids of all runs, oldest first (they sort by time)."""
    return store.list("runs")


def read_record(store: Store, run_id: str) -> RunRecord:
    """The record of a run.

    Raises:
        UsageError: there is no such run.
    """
    data = store.read(f"runs/{run_id}/run.json")
    if data is None:
        known = list_runs(store)
        shown = ", ".join(known[-5:]) or "none yet"
        raise UsageError(f"run {run_id!r} is not in {store.url}; the newest are: {shown}", hint="see `pipeline runs`")
    fields = json.loads(data)
    return RunRecord(**{**fields, "overrides": tuple(fields["overrides"])})


def read_run(store: Store, run_id: str, *, series: bool) -> RunView:
    """Rebuild a run from its events.

    Args:
        store: where it is.
        run_id: which.
        series: read the metric series and figures too (for a reused stage, those of the run that computed it).

    Raises:
        UsageError: there is no such run.
    """
    record = read_record(store, run_id)
    run: dict[str, Any] = {"status": RunStatus.RUNNING, "error": None, "tracking_gap": 0}
    stages: dict[str, StageView] = {}
    ended_at: float | None = None
    for name in store.list(f"runs/{run_id}/events"):
        data = store.read(f"runs/{run_id}/events/{name}")
        event = json.loads(data) if data else {}
        if "stage" in event:
            stage = _decode_stage(event["stage"])
            stages[stage.name] = stage
        if "run" in event:
            run = event["run"]
            ended_at = None if run["status"] == RunStatus.RUNNING else event["time"]
    views = list(stages.values())
    if run["status"] != RunStatus.RUNNING:
        views = [_settled(view, ended_at=ended_at) for view in views]
    if series:
        views = [_with_series(store, run_id, view) for view in views]
    return RunView(
        run_id=run_id,
        flow=record.flow,
        flow_file=os.path.relpath(record.flow_file, record.project_root),
        flow_text=record.resolved_text,
        status=RunStatus(run["status"]),
        started_at=record.started_at,
        ended_at=ended_at,
        parameters=record.parameters,
        stages=tuple(views),
        error=run["error"],
        host=record.host,
        user=record.user,
        tracking_gap=run["tracking_gap"],
    )


def _settled(stage: StageView, *, ended_at: float | None) -> StageView:
    """A stage of an ended run that never got to write its own end (the driver was killed)."""
    if stage.status not in (StageStatus.RUNNING, StageStatus.WAITING, StageStatus.PENDING):
        return stage
    attempts = tuple(
        replace(attempt, status=StageStatus.INTERRUPTED, ended_at=ended_at, error="the driver died")
        if attempt.ended_at is None
        else attempt
        for attempt in stage.attempts
    )
    return replace(stage, status=StageStatus.INTERRUPTED, attempts=attempts)


def _decode_stage(fields: dict[str, Any]) -> StageView:
    return StageView(
        **{
            **fields,
            "status": StageStatus(fields["status"]),
            "needs": tuple(fields["needs"]),
            "attempts": tuple(
                AttemptView(**{**attempt, "status": StageStatus(attempt["status"])}) for attempt in fields["attempts"]
            ),
            "hops": tuple(HopView(**hop) for hop in fields.get("hops", ())),  # older runs have none
            "gates": tuple(GateVerdict(**gate) for gate in fields["gates"]),
        }
    )


def read_reports(store: Store, run_id: str, stage: str, attempt: int) -> list[Report]:
    """What an attempt reported; empty where nothing was kept."""
    data = store.read(f"{attempt_key(run_id, stage, attempt)}/reports.jsonl")
    return [Report(**json.loads(line)) for line in (data or b"").splitlines()]


def collect_series(reports: Iterable[Report]) -> dict[str, list[SeriesPoint]]:
    """Metric series by name; a step reported twice (a resumed attempt) keeps its last value."""
    series: dict[str, dict[int, SeriesPoint]] = {}
    for report in reports:
        if report.kind == "metrics" and report.step is not None:
            for name, value in report.payload.items():
                point = SeriesPoint(step=report.step, value=value, time=report.time)
                series.setdefault(name, {})[report.step] = point
    return {name: [points[step] for step in sorted(points)] for name, points in series.items()}


def _with_series(store: Store, run_id: str, stage: StageView) -> StageView:
    producer = stage.producer_run_id or run_id
    attempts = [int(name) for name in store.list(f"runs/{producer}/stages/{stage.name}") if name.isdigit()]
    reports = [report for attempt in sorted(attempts) for report in read_reports(store, producer, stage.name, attempt)]
    figures = {report.payload["name"]: report.payload["chart"] for report in reports if report.kind == "figure"}
    return replace(stage, series=collect_series(reports), figures=figures)
