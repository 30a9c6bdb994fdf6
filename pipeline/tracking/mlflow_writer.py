"""Runs, attempts and reuse, written to MLflow.

Owns how a flow run looks in MLflow: one parent run, one child per stage attempt and per reused stage, the same tags on
each. Knows nothing of queues and threads. The one decision: runs are found by our tags (`pipeline.run_id`,
`pipeline.stage`, `pipeline.attempt`), never by remembered ids alone, so that every call may be repeated, a rerun takes
its parent up again, and a run whose opening was lost is opened by whatever comes next.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from pipeline.stages.protocol import JSON, Report
from pipeline.tracking import mlflow_entities as entities
from pipeline.tracking.chart import standalone_svg
from pipeline.tracking.delivery import (
    Call,
    DeliverReports,
    FinishAttempt,
    FinishRun,
    Reconcile,
    RecordReuse,
    RefusedError,
    StartAttempt,
    StartRun,
)
from pipeline.tracking.mlflow_client import all_experiments, experiment_id, find_run, open_client, translated
from pipeline.tracking.mlflow_deployments import remember_deployment
from pipeline.tracking.parameter_table import flatten
from pipeline.tracking.redaction import scrub
from pipeline.tracking.view import RunStatus, RunView, StageStatus, StageView

MLFLOW_STATUS: Mapping[RunStatus | StageStatus, str] = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.DONE: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.CRASHED: "FAILED",
    StageStatus.PENDING: "SCHEDULED",
    StageStatus.WAITING: "SCHEDULED",
    StageStatus.RUNNING: "RUNNING",
    StageStatus.DONE: "FINISHED",
    StageStatus.REUSED: "FINISHED",
    StageStatus.FAILED: "FAILED",
    StageStatus.SKIPPED: "KILLED",
    StageStatus.INTERRUPTED: "KILLED",
}
"""MLflow has five words; `pipeline.status` keeps ours."""
MAX_LOG_BYTES = 20_000_000

AttemptKey = tuple[str, str, int]


class MlflowWriter:
    """The `Writer` behind `MlflowTracker`; used from one thread.

    Args:
        uri: tracking server or `sqlite:///` file.
        artifact_root: directory or URL for artifacts; None leaves the choice to the server.
        experiment: name of the experiment; None takes one per flow.
    """

    def __init__(self, *, uri: str, artifact_root: str | None, experiment: str | None) -> None:
        self._uri = uri
        self._artifact_root = artifact_root
        self._experiment = experiment
        self._client: MlflowClient = open_client(uri)
        self._runs: dict[str, RunView] = {}
        self._attempts: dict[AttemptKey, StartAttempt] = {}
        self._parents: dict[str, str] = {}
        self._children: dict[AttemptKey, str] = {}
        self._experiments: dict[str, str] = {}
        self._notes: dict[AttemptKey, list[str]] = {}
        self._incomplete: set[AttemptKey] = set()
        self._described: set[str] = set()
        self._actions: Mapping[type, Callable[[Any], None]] = {
            StartRun: self._start_run,
            StartAttempt: self._start_attempt,
            DeliverReports: self._reports,
            FinishAttempt: self._finish_attempt,
            RecordReuse: self._record_reuse,
            FinishRun: self._finish_run,
            Reconcile: self._reconcile,
        }

    def write(self, call: Call) -> None:
        """Deliver one call; raises as `Writer.write` says."""
        if isinstance(call, StartRun):
            self._runs[call.run.run_id] = call.run
        elif isinstance(call, FinishRun):
            self._runs.setdefault(call.run.run_id, call.run)
        elif isinstance(call, StartAttempt):
            self._attempts[call.run_id, call.stage.name, call.attempt] = call
        with translated(self._uri):
            self._actions[type(call)](call)

    def lost(self, call: Call) -> None:
        """Remember whose values have a hole; `finish_attempt` fills it from the stage's own series."""
        if isinstance(call, DeliverReports):
            self._incomplete.add((call.run_id, call.stage, call.attempt))

    def _start_run(self, call: StartRun) -> None:
        run = call.run
        parent = self._parent(run.run_id)
        self._client.update_run(parent, status="RUNNING")
        self._client.set_tag(parent, "pipeline.status", RunStatus.RUNNING.value)
        self._describe(parent, run)

    def _describe(self, parent: str, run: RunView) -> None:
        """What the run was given; by whichever call comes through first."""
        table = flatten(run.parameters)
        self._log(parent, params=entities.params(table))
        self._client.log_dict(parent, table, "parameters.json")
        if run.flow_text:
            self._client.log_text(parent, scrub(run.flow_text), "flow.yaml")
        self._described.add(run.run_id)

    def _start_attempt(self, call: StartAttempt) -> None:
        child = self._child((call.run_id, call.stage.name, call.attempt), call.stage)
        self._log(child, params=entities.params(call.parameters))
        if entities.is_cut(call.parameters):
            self._client.log_dict(child, call.parameters, "parameters.json")

    def _reports(self, call: DeliverReports) -> None:
        key = (call.run_id, call.stage, call.attempt)
        child = self._child(key, None)
        self._log(child, metrics=entities.metrics_of_reports(call.reports))
        for report in call.reports:
            if report.kind == "figure":
                self._log_figure(child, str(report.payload["name"]), report.payload["chart"])
        datasets = [entities.dataset_input(report.payload) for report in call.reports if report.kind == "dataset"]
        if datasets:
            self._client.log_inputs(child, datasets=datasets)
        notes = [_note_line(report) for report in call.reports if report.kind == "note"]
        if notes:
            kept = self._notes.setdefault(key, [])
            self._client.log_text(child, "\n".join([*kept, *notes]) + "\n", "logs/notes.txt")
            kept.extend(notes)

    def _finish_attempt(self, call: FinishAttempt) -> None:
        key = (call.run_id, call.stage.name, call.attempt)
        late = key not in self._children
        child = self._child(key, call.stage)
        view = next((a for a in call.stage.attempts if a.attempt == call.attempt), None)
        ended_at = (view.ended_at if view else None) or time.time()
        if late or key in self._incomplete:
            self._log(child, metrics=entities.metrics_of_series(call.stage.series))
        for name, chart in call.stage.figures.items():
            self._log_figure(child, name, chart)
        status = view.status if view and view.status is not StageStatus.RUNNING else call.stage.status
        self._log_outcome(child, call.stage, time_seconds=ended_at)
        event = call.stage.facts.get("deployment_event")
        if isinstance(event, Mapping) and status is StageStatus.DONE:
            remember_deployment(self._client, event)
        self._log(
            child,
            tags={
                "pipeline.status": status.value,
                "pipeline.failure_class": view.failure_class if view else None,
                "pipeline.error": view.error if view else None,
            },
        )
        if call.log_path is not None and call.log_path.is_file():
            self._client.log_text(child, scrub(_tail(call.log_path)), f"logs/{call.log_path.name}")
        self._client.set_terminated(child, MLFLOW_STATUS[status], entities.milliseconds(ended_at))
        self._incomplete.discard(key)
        self._notes.pop(key, None)

    def _record_reuse(self, call: RecordReuse) -> None:
        stage, run = call.stage, self._known_run(call.run_id)
        parent = self._parent(call.run_id)
        identity = {"pipeline.run_id": call.run_id, "pipeline.stage": stage.name, "pipeline.role": "reused"}
        child = find_run(self._client, [self._experiment_of(run)], identity)
        producer = self._producer(stage)
        if child is None:
            child = self._create(
                run,
                name=f"{stage.name} (reused)",
                started_at=time.time(),
                tags={
                    **_stage_tags(run, stage),
                    **identity,
                    "mlflow.parentRunId": parent,
                    "pipeline.status": StageStatus.REUSED.value,
                    "pipeline.reused_from_run": stage.producer_run_id,
                    "pipeline.reused_from_mlflow_run": producer,
                    "mlflow.note.content": _reuse_note(stage, producer),
                },
            )
        self._log(child, params=entities.params(call.parameters))
        self._log_outcome(child, stage, time_seconds=time.time())
        self._client.set_terminated(child, "FINISHED")

    def _finish_run(self, call: FinishRun) -> None:
        run = call.run
        parent = self._parent(run.run_id)
        if run.run_id not in self._described:
            self._describe(parent, run)
        ended_at = run.ended_at or time.time()
        metrics = [
            Metric(entities.entity_name(f"{stage.name}/{name}"), float(value), int(ended_at * 1000), 0)
            for stage in run.stages
            for name, value in stage.metrics.items()
        ]
        gates = {
            f"pipeline.gate.{stage.name}.{verdict.metric}": str(verdict)
            for stage in run.stages
            for verdict in stage.gates
        }
        for stage in run.stages:
            gates |= _fallback_tags(stage, prefix=f"pipeline.fallback.{stage.name}")
        self._log(
            parent,
            metrics=metrics,
            tags={
                **gates,
                "pipeline.status": run.status.value,
                "pipeline.error": run.error,
                "pipeline.tracking_gap": run.tracking_gap,
            },
        )
        if call.report_path is not None and call.report_path.is_file():
            self._client.log_artifact(parent, str(call.report_path))
        self._client.set_terminated(parent, MLFLOW_STATUS[run.status], entities.milliseconds(ended_at))

    def _reconcile(self, call: Reconcile) -> None:
        """Parent and every child still RUNNING get the final status; nothing to do where MLflow never saw the run."""
        filter_string = f"tags.`pipeline.run_id` = '{call.run_id}' and attributes.status = 'RUNNING'"
        for found in self._client.search_runs(
            all_experiments(self._client), filter_string=filter_string, max_results=1000
        ):
            self._client.set_tag(found.info.run_id, "pipeline.status", call.status.value)
            self._client.set_terminated(found.info.run_id, MLFLOW_STATUS[call.status])

    def _known_run(self, run_id: str) -> RunView:
        if run_id not in self._runs:
            raise RefusedError(f"run {run_id!r} was never started here")
        return self._runs[run_id]

    def _experiment_of(self, run: RunView) -> str:
        name = self._experiment or run.flow
        if name not in self._experiments:
            folder = entities.entity_name(name).replace("/", "_").replace(":", "_").replace(" ", "_")
            root = f"{self._artifact_root.rstrip('/')}/{folder}" if self._artifact_root else None
            self._experiments[name] = experiment_id(self._client, name, artifact_location=root)
        return self._experiments[name]

    def _parent(self, run_id: str) -> str:
        if run_id not in self._parents:
            run = self._known_run(run_id)
            identity = {"pipeline.run_id": run_id, "pipeline.role": "run"}
            found = find_run(self._client, [self._experiment_of(run)], identity)
            self._parents[run_id] = found or self._create(
                run,
                name=run_id,
                started_at=run.started_at,
                tags={**_run_tags(run), **identity, "mlflow.note.content": f"Flow `{run.flow}`, `{run.flow_file}`"},
            )
        return self._parents[run_id]

    def _child(self, key: AttemptKey, stage: StageView | None) -> str:
        if key not in self._children:
            run = self._known_run(key[0])
            parent = self._parent(key[0])
            if stage is None and key in self._attempts:
                stage = self._attempts[key].stage
            if stage is None:
                raise RefusedError(f"attempt {key[2]} of stage {key[1]!r} in run {key[0]!r} was never started here")
            identity = {
                "pipeline.run_id": key[0],
                "pipeline.stage": key[1],
                "pipeline.attempt": str(key[2]),
                "pipeline.role": "attempt",
            }
            found = find_run(self._client, [self._experiment_of(run)], identity)
            view = next((a for a in stage.attempts if a.attempt == key[2]), None)
            self._children[key] = found or self._create(
                run,
                name=key[1] if key[2] == 1 else f"{key[1]} #{key[2]}",
                started_at=view.started_at if view else time.time(),
                tags={
                    **_stage_tags(run, stage),
                    **identity,
                    "mlflow.parentRunId": parent,
                    "pipeline.status": StageStatus.RUNNING.value,
                },
            )
        return self._children[key]

    def _create(self, run: RunView, *, name: str, started_at: float, tags: Mapping[str, JSON]) -> str:
        kept = {tag.key: tag.value for tag in entities.tags(tags)}
        created = self._client.create_run(
            self._experiment_of(run), start_time=entities.milliseconds(started_at), tags=kept, run_name=name
        )
        return str(created.info.run_id)

    def _producer(self, stage: StageView) -> str | None:
        """The MLflow run that computed a reused artifact, in whichever experiment it is."""
        if stage.producer_run_id is None:
            return None
        wanted = {
            "pipeline.run_id": stage.producer_run_id,
            "pipeline.role": "attempt",
            "pipeline.status": StageStatus.DONE.value,
        }
        named = {"pipeline.fingerprint": stage.fingerprint} if stage.fingerprint else {"pipeline.stage": stage.name}
        return find_run(self._client, all_experiments(self._client), {**wanted, **named})

    def _log(
        self,
        mlflow_run: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Mapping[str, JSON] | None = None,
    ) -> None:
        for batch in entities.batches(metrics, entities.METRICS_IN_A_BATCH):
            self._client.log_batch(mlflow_run, metrics=batch)
        for some_params in entities.batches(params, entities.TEXTS_IN_A_BATCH):
            self._client.log_batch(mlflow_run, params=some_params)
        for some_tags in entities.batches(entities.tags(tags or {}), entities.TEXTS_IN_A_BATCH):
            self._client.log_batch(mlflow_run, tags=some_tags)

    def _log_outcome(self, child: str, stage: StageView, *, time_seconds: float) -> None:
        self._log(
            child,
            metrics=entities.final_metrics(stage.metrics, stage.series, time_seconds=time_seconds),
            tags={
                **{f"pipeline.gate.{verdict.metric}": str(verdict) for verdict in stage.gates},
                **{f"pipeline.digest.{output}": digest for output, digest in stage.digests.items()},
                "pipeline.fingerprint": stage.fingerprint,
                "pipeline.reason": stage.reason,
                "pipeline.bit_reproducible": stage.facts.get("bit_reproducible"),
                **_fallback_tags(stage, prefix="pipeline.fallback"),
            },
        )
        if stage.facts:
            self._client.log_text(child, scrub(entities.json_text(stage.facts)), "facts.json")

    def _log_figure(self, child: str, name: str, chart: Mapping[str, JSON]) -> None:
        path = f"figures/{entities.entity_name(name).replace('/', '_')}"
        self._client.log_text(child, entities.json_text(chart), f"{path}.json")
        self._client.log_text(child, standalone_svg(chart), f"{path}.svg")


def _run_tags(run: RunView) -> dict[str, JSON]:
    return {
        "pipeline.run_id": run.run_id,
        "pipeline.flow": run.flow,
        "pipeline.host": run.host or None,
        "mlflow.user": run.user or None,
        "mlflow.source.name": run.flow_file,
        "mlflow.source.type": "PROJECT",
    }


def _stage_tags(run: RunView, stage: StageView) -> dict[str, JSON]:
    return {
        **_run_tags(run),
        "pipeline.stage": stage.name,
        "pipeline.kind": stage.kind,
        "pipeline.fingerprint": stage.fingerprint,
        "pipeline.reason": stage.reason,
    }


def _reuse_note(stage: StageView, producer: str | None) -> str:
    link = f" (MLflow run `{producer}`)" if producer else ""
    return f"Reused: {stage.reason}. Computed by run `{stage.producer_run_id}`{link}."


def _fallback_tags(stage: StageView, *, prefix: str) -> dict[str, str]:
    return {f"{prefix}.{number}": str(hop) for number, hop in enumerate(stage.hops, start=1)}


def _note_line(report: Report) -> str:
    clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(report.time))
    return f"{clock} {scrub(str(report.payload['text']))}"


def _tail(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return text if size <= MAX_LOG_BYTES else f"(the first {size - MAX_LOG_BYTES} bytes are left out)\n{text}"
