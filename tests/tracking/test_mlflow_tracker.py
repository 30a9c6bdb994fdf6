"""How runs look in MLflow, and what happens when its server is away or the driver dies."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from sample_run import FLOW_TEXT, START, llm_run
from test_tracker_contract import closed, metrics, open_stage

from pipeline.stages.protocol import Report
from pipeline.tracking.mlflow_tracker import MlflowTracker, sqlite_uri, store_tracker
from pipeline.tracking.mlflow_ui import free_port, ui_server
from pipeline.tracking.view import RunStatus, StageStatus

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def run():
    return replace(llm_run(status=RunStatus.RUNNING), run_id=f"run-{uuid.uuid4().hex[:12]}", flow="looks")


def runs_of(client, run_id, **tags):
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    wanted = {"pipeline.run_id": run_id, **tags}
    text = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
    return client.search_runs(experiments, text)


def only(client, run_id, **tags):
    (found,) = runs_of(client, run_id, **tags)
    return found


def artifact(client, mlflow_run, path):
    return Path(client.download_artifacts(mlflow_run.info.run_id, path)).read_text(encoding="utf-8")


def play(tracker, run, *, log_path=None, report_path=None):
    """A whole run: `data` reused, `train` done."""
    tracker.start_run(run)
    tracker.record_reuse(run.run_id, run.stages[0], parameters={"source": "stdlib"})
    stage = open_stage(run)
    tracker.start_attempt(run.run_id, stage, attempt=1, parameters={"steps": 3})
    reports = [metrics({"loss": 1.0 / step, "odd name @5": 1.0}, step) for step in range(1, 4)]
    figure = {"name": "parity/logits", "chart": run.stages[3].figures["logits"]}
    dataset = {"name": "train", "digest": "d" * 64, "source": "s3://u:hunter2@b/x", "facts": {"num_tokens": 5}}
    for kind, payload in (("figure", figure), ("dataset", dataset), ("note", {"text": "at http://u:hunter2@h"})):
        reports.append(Report(kind=kind, payload=payload, time=START))
    tracker.report(run.run_id, "train", attempt=1, reports=reports)
    done = closed(
        stage,
        StageStatus.DONE,
        metrics={"loss": 0.25},
        gates=run.stages[4].gates,
        facts={"device": "cpu"},
        digests={"checkpoint": "c" * 64},
        series={"loss": run.stages[1].series["loss"][:3]},
    )
    tracker.finish_attempt(run.run_id, done, attempt=1, log_path=log_path)
    finished = replace(run, status=RunStatus.DONE, ended_at=START + 9, stages=(run.stages[0], done))
    tracker.finish_run(finished, report_path=report_path)


def test_a_run_in_mlflow_has_everything_a_reader_looks_for(mlflow_tracker, mlflow_client, run, tmp_path):
    log_path, report_path = tmp_path / "output.log", tmp_path / "report.html"
    log_path.write_text("connected to redis://u:hunter2@cache\n")
    report_path.write_text("<p>report</p>")
    play(mlflow_tracker, run, log_path=log_path, report_path=report_path)
    mlflow_tracker.close(timeout_seconds=60)
    assert (mlflow_tracker.gap, mlflow_tracker.last_error) == (0, "")
    parent = only(mlflow_client, run.run_id, **{"pipeline.role": "run"})
    child = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    assert mlflow_client.get_experiment(parent.info.experiment_id).name == "looks"
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert (parent.info.start_time, parent.info.end_time) == (int(START * 1000), int((START + 9) * 1000))
    assert parent.data.params["learning_rate"] == "0.001"
    assert parent.data.metrics["train/loss"] == 0.25
    assert parent.data.tags["mlflow.user"] == "ada"
    assert artifact(mlflow_client, parent, "flow.yaml") == FLOW_TEXT
    assert artifact(mlflow_client, parent, "report.html") == "<p>report</p>"
    expected = {
        "pipeline.flow": "looks",
        "pipeline.stage": "train",
        "pipeline.kind": "train.fsdp",
        "pipeline.attempt": "1",
        "pipeline.fingerprint": run.stages[1].fingerprint,
        "pipeline.status": "DONE",
        "pipeline.digest.checkpoint": "c" * 64,
        "pipeline.gate.validation_loss": "validation_loss = 3.2071 holds <= 5.5",
        "mlflow.parentRunId": parent.info.run_id,
        "mlflow.source.name": "flows/llm.yaml",
    }
    assert {key: child.data.tags.get(key) for key in expected} == expected
    history = mlflow_client.get_metric_history(child.info.run_id, "loss")
    assert [(m.step, m.timestamp) for m in history][:3] == [(s, int((START + s) * 1000)) for s in (1, 2, 3)]
    assert child.data.metrics["loss"] == 0.25
    assert child.data.metrics["odd name _5"] == 1.0
    assert json.loads(artifact(mlflow_client, child, "facts.json")) == {"device": "cpu"}
    assert "<svg" in artifact(mlflow_client, child, "figures/parity_logits.svg")
    assert json.loads(artifact(mlflow_client, child, "figures/parity_logits.json"))["kind"] == "scatter"
    (dataset,) = child.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("train", "d" * 36)
    assert {tag.key: tag.value for tag in dataset.tags}["pipeline.digest"] == "d" * 64
    for text in (
        artifact(mlflow_client, child, "logs/output.log"),
        artifact(mlflow_client, child, "logs/notes.txt"),
        dataset.dataset.source,
    ):
        assert "hunter2" not in text
        assert "***" in text


def test_a_reused_stage_links_to_the_mlflow_run_that_computed_it(mlflow_tracker, mlflow_client, run):
    play(mlflow_tracker, run)
    later = replace(run, run_id=f"{run.run_id}-later", flow="another flow")
    mlflow_tracker.start_run(later)
    reused = replace(run.stages[1], status=StageStatus.REUSED, producer_run_id=run.run_id, attempts=())
    mlflow_tracker.record_reuse(later.run_id, reused, parameters={})
    mlflow_tracker.close(timeout_seconds=60)
    producer = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    child = only(mlflow_client, later.run_id, **{"pipeline.role": "reused"})
    assert child.data.tags["pipeline.reused_from_run"] == run.run_id
    assert child.data.tags["pipeline.reused_from_mlflow_run"] == producer.info.run_id
    assert child.info.status == "FINISHED"


def test_long_parameters_are_cut_and_kept_whole_beside(mlflow_tracker, mlflow_client, run):
    mlflow_tracker.start_run(run)
    mlflow_tracker.start_attempt(
        run.run_id, open_stage(run), attempt=1, parameters={"long": "x" * 9000, "api_key": "k"}
    )
    mlflow_tracker.close(timeout_seconds=60)
    child = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    assert len(child.data.params["long"]) == 6000
    assert child.data.params["long"].endswith("parameters.json)")
    assert json.loads(artifact(mlflow_client, child, "parameters.json")) == {"long": "x" * 9000, "api_key": "***"}


def test_values_that_are_not_finite_are_delivered(mlflow_tracker, mlflow_client, run):
    mlflow_tracker.start_run(run)
    mlflow_tracker.start_attempt(run.run_id, open_stage(run), attempt=1, parameters={})
    reports = [metrics({"loss": float("nan"), "up": float("inf")}, 1)]
    mlflow_tracker.report(run.run_id, "train", attempt=1, reports=reports)
    mlflow_tracker.close(timeout_seconds=60)
    child = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    assert child.data.metrics["loss"] != child.data.metrics["loss"]
    assert child.data.metrics["up"] > 1e300


def test_a_run_id_in_the_environment_redirects_nothing(mlflow_store, mlflow_client, run, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    tracker = store_tracker(mlflow_store, sample_seconds=0)
    play(tracker, run)
    tracker.close(timeout_seconds=60)
    assert tracker.gap == 0
    assert len(runs_of(mlflow_client, run.run_id)) == 3


@pytest.mark.parametrize(
    ("status", "mlflow_status"),
    [(RunStatus.DONE, "FINISHED"), (RunStatus.FAILED, "FAILED"), (RunStatus.INTERRUPTED, "KILLED")],
)
def test_mlflow_shows_the_status_in_its_own_words(mlflow_tracker, mlflow_client, run, status, mlflow_status):
    mlflow_tracker.start_run(run)
    mlflow_tracker.finish_run(replace(run, status=status, stages=()), report_path=None)
    mlflow_tracker.close(timeout_seconds=60)
    assert only(mlflow_client, run.run_id).info.status == mlflow_status


def test_a_run_whose_opening_was_lost_is_whole_when_it_ends(mlflow_tracker, mlflow_client, run):
    mlflow_tracker.finish_run(replace(run, status=RunStatus.FAILED, error="x" * 9000), report_path=None)
    mlflow_tracker.close(timeout_seconds=60)
    parent = only(mlflow_client, run.run_id)
    assert (parent.info.status, parent.data.params["steps"]) == ("FAILED", "300")
    assert artifact(mlflow_client, parent, "flow.yaml") == FLOW_TEXT


def test_metrics_lost_in_an_outage_are_filled_in_when_the_attempt_ends(mlflow_store, mlflow_client, run):
    from pipeline.tracking.delivery import DeliverReports, FinishAttempt, StartAttempt, StartRun
    from pipeline.tracking.mlflow_writer import MlflowWriter

    writer = MlflowWriter(uri=sqlite_uri(mlflow_store), artifact_root=None, experiment=None)
    stage = open_stage(run)
    writer.write(StartRun(run=run))
    writer.write(StartAttempt(run_id=run.run_id, stage=stage, attempt=1, parameters={}))
    writer.lost(DeliverReports(run_id=run.run_id, stage="train", attempt=1, reports=()))
    done = closed(stage, StageStatus.DONE, series={"loss": run.stages[1].series["loss"]})
    writer.write(FinishAttempt(run_id=run.run_id, stage=done, attempt=1, log_path=None))
    child = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    assert len(mlflow_client.get_metric_history(child.info.run_id, "loss")) == 60


def test_the_machine_is_sampled_while_an_attempt_runs(mlflow_store, mlflow_client, run):
    tracker = store_tracker(mlflow_store, sample_seconds=0.05)
    tracker.start_run(run)
    stage = open_stage(run)
    tracker.start_attempt(run.run_id, stage, attempt=1, parameters={})
    time.sleep(0.4)
    tracker.finish_attempt(run.run_id, closed(stage, StageStatus.DONE), attempt=1, log_path=None)
    tracker.close(timeout_seconds=60)
    child = only(mlflow_client, run.run_id, **{"pipeline.role": "attempt"})
    assert child.data.metrics["system/system_memory_usage_megabytes"] > 10
    assert len(mlflow_client.get_metric_history(child.info.run_id, "system/cpu_utilization_percentage")) >= 2


def test_a_driver_that_is_killed_leaves_a_run_that_can_be_reconciled(mlflow_store, mlflow_client, run):
    code = f"""
        import sys, time
        sys.path[:0] = [{str(REPOSITORY)!r}, {str(Path(__file__).parent)!r}]
        from dataclasses import replace
        from pathlib import Path
        from sample_run import llm_run
        from test_tracker_contract import open_stage
        from pipeline.tracking.mlflow_tracker import store_tracker
        run = replace(llm_run(), run_id={run.run_id!r}, flow="looks")
        tracker = store_tracker(Path({str(mlflow_store)!r}))
        tracker.start_run(run)
        tracker.start_attempt(run.run_id, open_stage(run), attempt=1, parameters={{}})
        assert tracker._delivery.flush(timeout_seconds=60)
        print("delivered", flush=True)
        time.sleep(60)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "delivered\n"
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(timeout=10)
    driver.stdout.close()
    assert {found.info.status for found in runs_of(mlflow_client, run.run_id)} == {"RUNNING"}
    tracker = store_tracker(mlflow_store)
    tracker.reconcile(run.run_id, RunStatus.CRASHED)
    tracker.close(timeout_seconds=60)
    found = runs_of(mlflow_client, run.run_id)
    assert [(r.info.status, r.data.tags["pipeline.status"]) for r in found] == [("FAILED", "CRASHED")] * 2


def test_importing_and_constructing_a_tracker_loads_no_mlflow(tmp_path):
    code = (
        "import sys, pathlib\nfrom pipeline.tracking.mlflow_tracker import store_tracker\n"
        f"tracker = store_tracker(pathlib.Path({str(tmp_path)!r}))\ntracker.registry\n"
        "tracker.close(timeout_seconds=1)\nassert not any(name.split('.')[0] == 'mlflow' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_never_holds_up_the_run_and_the_gap_is_counted(run):
    tracker = MlflowTracker(f"http://ada:hunter2@127.0.0.1:{free_port()}", sample_seconds=0)
    started = time.perf_counter()
    play(tracker, run)
    assert time.perf_counter() - started < 0.5
    tracker.close(timeout_seconds=30)
    assert time.perf_counter() - started < 20
    assert tracker.gap == 6
    assert "hunter2" not in tracker.last_error
    assert "127.0.0.1" in tracker.last_error


@pytest.mark.slow
def test_when_the_server_comes_back_delivery_resumes_and_the_late_runs_are_whole(tmp_path, run):
    port = free_port()
    tracker = MlflowTracker(f"http://127.0.0.1:{port}", sample_seconds=0)
    play(tracker, run)
    time.sleep(0.5)
    with ui_server(sqlite_uri(tmp_path), port=port, log_path=tmp_path / "ui.log") as (url, server):
        tracker.close(timeout_seconds=60)
        assert tracker.gap == 0
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=sqlite_uri(tmp_path))
        assert len(runs_of(client, run.run_id)) == 3
        child = only(client, run.run_id, **{"pipeline.role": "attempt"})
        assert [m.step for m in client.get_metric_history(child.info.run_id, "loss")][:3] == [1, 2, 3]
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        tags = {"pipeline.run_id": run.run_id}
        made = tracker.registry.register(name="m", source=str(model), tags=tags, alias="champion", description="d")
        source = client.get_model_version("m", made.version).source
        parent = only(client, run.run_id, **{"pipeline.role": "run"})
        assert source.startswith("mlflow-artifacts:")
        assert artifact(MlflowClient(tracking_uri=url), parent, "models/m/config.json") == "{}"
    assert server.poll() is not None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=2)


def test_the_registry_is_asked_only_after_what_is_queued(mlflow_store):
    """In a fresh interpreter, where the delivery thread is still importing MLflow when the registry is asked."""
    script = (
        "import sys; sys.path[:0] = PATHS\n"
        "from sample_run import llm_run\n"
        "from pipeline.tracking.mlflow_tracker import store_tracker\n"
        "from pathlib import Path\n"
        "tracker = store_tracker(Path(STORE))\n"
        "tracker.start_run(llm_run())\n"
        "print(tracker.registry.has(name='nosuch', version='1'))\n"
        "tracker.close(timeout_seconds=30)\n"
    )
    script = script.replace("PATHS", repr([str(Path(__file__).parent)])).replace("STORE", repr(str(mlflow_store)))
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.strip() == "False", done.stderr[-2000:]
