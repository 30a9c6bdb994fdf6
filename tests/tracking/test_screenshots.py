"""The script that takes the README's pictures, on a small run."""

import importlib.util
import struct
import sys
from dataclasses import replace

import pytest
from browser import DOCS, chromium
from sample_run import llm_run

from pipeline.tracking.mlflow_tracker import store_tracker
from pipeline.tracking.report import render_report

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def load_screenshots():
    sys.modules["chromium"] = chromium
    spec = importlib.util.spec_from_file_location("docs_screenshots", DOCS / "screenshots.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def size_of(png):
    return struct.unpack(">II", png.read_bytes()[16:24])


def test_every_picture_of_a_finished_run_is_taken(page, tmp_path):
    run = llm_run()
    report = tmp_path / "runs" / run.run_id / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text(render_report(run), encoding="utf-8")
    tracker = store_tracker(tmp_path, sample_seconds=0)
    tracker.start_run(run)
    train = run.stages[1]
    for attempt in train.attempts:
        view = replace(train, attempts=(attempt,), status=attempt.status)
        tracker.start_attempt(run.run_id, view, attempt=attempt.attempt, parameters={"steps": 300})
        tracker.finish_attempt(run.run_id, view, attempt=attempt.attempt, log_path=None)
    tags = {"pipeline.run_id": run.run_id, "pipeline.fingerprint": "f", "gate.greedy_match": "1 >= 1 holds"}
    tracker.registry.register(name="m", source=str(tmp_path), tags=tags, alias="champion", description="d")
    tracker.finish_run(run, report_path=report)
    tracker.close(timeout_seconds=60)
    images = tmp_path / "images"
    assert load_screenshots().main(["--store", str(tmp_path), "--output", str(images)]) == 0
    names = {"report.png", "report-dark.png", "mlflow-runs.png", "mlflow-run.png", "mlflow-model.png"}
    assert {path.name for path in images.iterdir()} == names
    assert all(size_of(images / name)[0] == 1280 for name in names)


def test_a_store_without_a_finished_run_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no finished run"):
        load_screenshots().main(["--store", str(tmp_path), "--output", str(tmp_path / "images")])
