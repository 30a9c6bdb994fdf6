"""Bench results in MLflow.

Owns one experiment, `bench`, with a run for each measurement. The one decision: the whole result is kept as JSON
beside its ratios, so that any row can be read again.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.errors import TrackingError
from pipeline.tracking.mlflow_settings import apply_client_settings

EXPERIMENT = "bench"
_NOT_IN_NAMES = re.compile(r"[^\w .:/-]")
"""Characters that MLflow refuses in the name of a metric."""


def log_bench(uri: str, *, artifact_root: str | None, name: str, result: Mapping[str, Any]) -> None:
    """Log one result.

    Args:
        uri: the tracking server or SQLite file.
        artifact_root: directory or URL for artifacts; None leaves the choice to the server.
        name: of the bench.
        result: `{"machine": ..., "rows": [...]}`.

    Raises:
        TrackingError: the server is away or refused.
    """
    apply_client_settings()
    now = int(time.time() * 1000)
    try:
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        identifier = (
            client.create_experiment(EXPERIMENT, artifact_location=artifact_root)
            if experiment is None
            else experiment.experiment_id
        )
        run = client.create_run(identifier, run_name=name, tags={"pipeline.bench": name}).info.run_id
        figures = {
            f"{row['name']}.{key}": row[key]
            for row in result["rows"]
            for key in ("ours", "peer", "ratio")
            if row[key] is not None
        }
        client.log_batch(
            run,
            metrics=[Metric(_NOT_IN_NAMES.sub("_", key), float(value), now, 0) for key, value in figures.items()],
            params=[Param(f"machine.{key}", str(value)) for key, value in result["machine"].items()],
            tags=[RunTag("pipeline.ok", str(all(row["ok"] for row in result["rows"])))],
        )
        client.log_text(run, json.dumps(result, indent=1), "bench.json")
        client.set_terminated(run)
    except MlflowException as error:
        raise TrackingError(f"the bench could not be logged: {error}", hint="use --no-tracking") from error
