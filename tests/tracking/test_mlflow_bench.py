import json
from pathlib import Path

from pipeline.tracking.mlflow_bench import EXPERIMENT, log_bench
from pipeline.tracking.mlflow_tracker import sqlite_uri

RESULT = {
    "machine": {"cpus": 2, "cpu": "some CPU (R) @ 2 GHz"},
    "rows": [
        {
            "name": "train llama-8m, 2 ranks, 4096 tokens a step (steady)",
            "unit": "tokens/s",
            "ours": 990.0,
            "peer_name": "bare FSDP2 loop",
            "peer": 1000.0,
            "ratio": 0.99,
            "bar": 0.95,
            "ok": True,
        },
        {
            "name": "absent",
            "unit": "s",
            "ours": 1.0,
            "peer_name": "x",
            "peer": None,
            "ratio": None,
            "bar": 1,
            "ok": False,
        },
    ],
}


def test_every_figure_of_a_bench_is_kept_whatever_its_row_is_called(mlflow_store, mlflow_client):
    log_bench(sqlite_uri(mlflow_store), artifact_root=str(mlflow_store / "artifacts"), name="train", result=RESULT)
    experiment = mlflow_client.get_experiment_by_name(EXPERIMENT)
    (run,) = mlflow_client.search_runs([experiment.experiment_id])
    assert sorted(run.data.metrics.values()) == [0.99, 1.0, 990.0, 1000.0]
    assert run.data.tags["pipeline.ok"] == "False"
    path = mlflow_client.download_artifacts(run.info.run_id, "bench.json")
    assert json.loads(Path(path).read_text()) == RESULT
