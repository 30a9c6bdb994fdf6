"""Takes the README's pictures of a finished run: `python docs/screenshots.py --store .pipeline`.

Owns which pages are shown, at which size. The one decision: pictures are taken of what a user gets (the run's own
`report.html`, MLflow's own interface on the store), never drawn, and by this script alone, so that they can be taken
again after every change.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from chromium import Page, open_page
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline.tracking.mlflow_settings import apply_client_settings
from pipeline.tracking.mlflow_tracker import sqlite_uri
from pipeline.tracking.mlflow_ui import ui_server

WIDTH = 1280
RUNS_COLUMNS = (
    "tags.`pipeline.kind`",
    "tags.`pipeline.status`",
    "metrics.`validation_loss`",
    "metrics.`max_abs_logit_difference`",
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What of the store is in the pictures."""

    experiment: str
    parent: Run
    trained: Run | None
    model: tuple[str, str] | None
    """Name and version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Take every picture; 0 when all were taken."""
    parser = argparse.ArgumentParser(description="Pictures of a finished run's report and of its lineage in MLflow.")
    parser.add_argument("--store", type=Path, required=True, help="directory with mlflow.db, for instance .pipeline")
    parser.add_argument("--run", help="run id; the newest finished run where absent")
    parser.add_argument("--report", type=Path, help="report.html; the one of the run in the store where absent")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args(arguments)
    apply_client_settings()
    shown = choose(MlflowClient(tracking_uri=sqlite_uri(given.store)), run_id=given.run)
    with TemporaryDirectory() as scratch, open_page() as page:
        report = given.report or given.store / "runs" / shown.parent.data.tags["pipeline.run_id"] / "report.html"
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            take_report(page, report, scheme=scheme, path=given.output / name)
        with ui_server(sqlite_uri(given.store), log_path=Path(scratch) / "mlflow.log") as (url, _):
            take_mlflow(page, url, shown, given.output)
    sys.stdout.write(f"pictures of run {shown.parent.data.tags['pipeline.run_id']} are in {given.output}\n")
    return 0


def choose(client: MlflowClient, *, run_id: str | None) -> Shown:
    """The parent run, its training attempt and the version it registered.

    Raises:
        SystemExit: the store has no such finished run.
    """
    wanted = "tags.`pipeline.role` = 'run' and attributes.status = 'FINISHED'"
    wanted += f" and tags.`pipeline.run_id` = '{run_id}'" if run_id else ""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    parents = client.search_runs(experiments, wanted, max_results=1, order_by=["start_time DESC"])
    if not parents:
        raise SystemExit(f"no finished run {run_id or ''} in this store")
    (parent,) = parents
    children = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    trained = [run for run in children if run.data.tags.get("pipeline.kind", "").startswith("train.")]
    own = parent.data.tags["pipeline.run_id"]
    versions = [version for version in client.search_model_versions() if version.tags.get("pipeline.run_id") == own]
    return Shown(
        experiment=str(parent.info.experiment_id),
        parent=parent,
        trained=trained[0] if trained else None,
        model=(versions[0].name, str(versions[0].version)) if versions else None,
    )


def take_report(page: Page, report: Path, *, scheme: str, path: Path) -> None:
    """The report down to its figures; the details below are folded and read better in the file itself."""
    page.prefer(scheme)
    page.resize(WIDTH, 900)
    page.open(report.resolve().as_uri())
    end = "[...document.querySelectorAll('section')].find(s => s.querySelector('h2').innerText === 'Stage by stage')"
    height = page.evaluate(f"Math.ceil(({end})?.offsetTop ?? document.documentElement.scrollHeight)")
    page.resize(WIDTH, int(height))
    page.picture(path)


def take_mlflow(page: Page, url: str, shown: Shown, output: Path) -> None:
    """MLflow's table of nested runs, the training attempt and the model version."""
    page.prefer("light")
    page.resize(WIDTH, 640)
    page.open(url)
    page.evaluate(f"Object.entries({json.dumps(_settings(shown))}).forEach(([k, v]) => localStorage.setItem(k, v))")

    def take(route: str, name: str, *, shows: str, height: int) -> None:
        page.open("about:blank")
        page.resize(WIDTH, height)
        page.open(f"{url}/#{route}")
        page.wait_for(f"document.body.innerText.includes({json.dumps(shows)})", timeout_seconds=60)
        page.settle()
        page.picture(output / name)

    runs = f"/experiments/{shown.experiment}/runs"
    take(runs, "mlflow-runs.png", shows="matching runs", height=640)
    if shown.trained is not None:
        take(f"{runs}/{shown.trained.info.run_id}", "mlflow-run.png", shows="validation_loss", height=900)
    if shown.model is not None:
        model, version = shown.model
        route = f"/models/{quote(model)}/versions/{version}"
        take(route, "mlflow-model.png", shows="gate.", height=900)


def _settings(shown: Shown) -> Mapping[str, str]:
    """What a user would click once: model training, no assistant, nested runs open, the columns that tell most."""
    state = {"selectedColumns": RUNS_COLUMNS, "runsExpanded": {shown.parent.info.run_id: True}}
    return {
        "mlflow.workflowType_v1": json.dumps("machine_learning"),
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        "mlflow.assistant.panelOpen_v1": "false",
        f"MLflowLocalStorage-1.1-ExperimentView-{shown.experiment}-expandRows": "true",
        f'MLflowLocalStorage-1.1-ExperimentPage-["{shown.experiment}"]-ReactComponentState': json.dumps(state),
    }


if __name__ == "__main__":
    sys.exit(main())
