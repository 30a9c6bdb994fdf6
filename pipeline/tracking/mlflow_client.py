"""Opening MLflow, and saying what its failures mean.

Owns the client's settings, the translation of MLflow's failures and the experiment of a flow. Knows nothing of
runs or stages. The one decision: the client API with explicit run ids, never the fluent one, so that neither
`MLFLOW_RUN_ID` in the environment nor another thread's active run can redirect what is logged.

Importing this file imports MLflow (1.3 s) and, with a SQL store, SQLAlchemy and alembic (0.7 s; 1.1 s more when the
schema is created; measured on two cores). That is why only the delivery thread and the registry
resolve it, by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy.exc
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.tracking.delivery import RefusedError, ServerAwayError
from pipeline.tracking.mlflow_settings import SQLITE, apply_client_settings
from pipeline.tracking.redaction import scrub

_AWAY_CODES = frozenset({"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"})


def open_client(uri: str) -> MlflowClient:
    """A client of the tracking server (and model registry) at `uri`; creates an SQLite file's directory and schema.

    Raises:
        ServerAwayError: the store cannot be opened now.
        RefusedError: the URI is not one that MLflow takes.
    """
    apply_client_settings()  # again: importing MLflow configures its own loggers
    with translated(uri):
        if uri.startswith(SQLITE):
            Path(uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn what MLflow raises into `ServerAwayError` (try again) and `RefusedError` (do not)."""
    try:
        yield
    except MlflowException as error:
        away = error.error_code in _AWAY_CODES
        raise (ServerAwayError if away else RefusedError)(f"{scrub(uri)}: {scrub(str(error))}") from error
    except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        raise ServerAwayError(f"{scrub(uri)}: {type(error).__name__}: {scrub(str(error))}") from error


def experiment_id(client: MlflowClient, name: str, *, artifact_location: str | None) -> str:
    """The id of the experiment `name`; created, or brought back where it was deleted.

    Two drivers may create it at once: the loser finds the winner's.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location))
        except MlflowException as error:
            found = client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def find_run(client: MlflowClient, experiments: list[str], tags: dict[str, str]) -> str | None:
    """The MLflow id of the newest run that has all these tags, or None."""
    text = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items() if "'" not in value)
    found = client.search_runs(
        experiments, filter_string=text, run_view_type=ViewType.ACTIVE_ONLY, max_results=1, order_by=["start_time DESC"]
    )
    return str(found[0].info.run_id) if found else None


def all_experiments(client: MlflowClient) -> list[str]:
    """Ids of every experiment that is not deleted."""
    return [str(experiment.experiment_id) for experiment in client.search_experiments()]
