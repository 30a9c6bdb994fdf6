"""How MLflow's client must behave inside a run.

Owns the environment settings and log levels. Loads no MLflow. The one decision: they are applied before MLflow is first
imported (it starts its telemetry on import) and only where the user's environment says nothing.
"""

import logging
import os

SQLITE = "sqlite:///"
DATABASE_FILE = "mlflow.db"
ARTIFACT_DIRECTORY = "mlflow-artifacts"
"""Where the default tracker keeps its database and artifacts, in the store's directory."""
CLIENT_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Our queue retries, so one request must fail in seconds (MLflow's own default is seven tries of two minutes)."""


def apply_client_settings() -> None:
    """Set what the environment leaves open, and keep MLflow's and alembic's progress lines out of the terminal."""
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
