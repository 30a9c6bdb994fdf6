"""What a change of a deployment leaves in the model registry."""

import json
import uuid

import pytest

from pipeline.errors import TrackingError
from pipeline.tracking.mlflow_deployments import MlflowDeployments
from pipeline.tracking.mlflow_registry import MlflowRegistry
from pipeline.tracking.mlflow_tracker import sqlite_uri
from pipeline.tracking.mlflow_ui import free_port


@pytest.fixture
def deployments(mlflow_store):
    return MlflowDeployments(uri=sqlite_uri(mlflow_store))


@pytest.fixture
def name(mlflow_store):
    """A model with two versions."""
    made = f"model-{uuid.uuid4().hex[:8]}"
    registry = MlflowRegistry(uri=sqlite_uri(mlflow_store))
    for number in ("1", "2"):
        tags = {
            "pipeline.run_id": f"run-{number}",
            "pipeline.fingerprint": f"{number}f",
            "model.digest": number * 64,
            "gate.validation_loss": "3.1 <= 6 holds",
        }
        registry.register(name=made, source=f"/models/{number}", tags=tags, alias="champion", description="")
    return made


def event_of(name, *, source, target, action="promote", when=1000.0):
    return {
        "name": "llm",
        "action": action,
        "when": when,
        "who": "ana@host",
        "source": None if source is None else {"version": source, "digest": source * 64},
        "target": {"version": target, "digest": target * 64},
        "how": "swapped",
        "seconds": 0.2,
        "gates": {},
        "reason": "s3://u:hunter2@b is full",
        "registered_model": name,
        "settings": {"model_path": "/models/1"},
    }


def test_the_version_carries_the_event_and_the_aliases_say_what_serves_and_served(deployments, mlflow_client, name):
    deployments.record_deployment(event_of(name, source="2", target="1", action="rollback"))
    aliases = {alias: str(version) for alias, version in mlflow_client.get_registered_model(name).aliases.items()}
    assert aliases == {"champion": "1", "previous": "2"}
    tags = mlflow_client.get_model_version(name, "1").tags
    (kept,) = [json.loads(value) for key, value in tags.items() if key.startswith("deployment.llm.rollback.1970")]
    assert (kept["who"], kept["source"]["version"], kept["how"]) == ("ana@host", "2", "swapped")
    assert "hunter2" not in kept["reason"] and "settings" not in kept


def test_recording_again_changes_nothing(deployments, mlflow_client, name):
    event = event_of(name, source="2", target="1")
    deployments.record_deployment(event)
    before = mlflow_client.get_model_version(name, "1").tags
    deployments.record_deployment(event)
    assert mlflow_client.get_model_version(name, "1").tags == before


def test_a_version_that_is_not_registered_leaves_nothing(deployments, mlflow_client, name):
    deployments.record_deployment({**event_of(name, source=None, target="1"), "registered_model": ""})
    assert "previous" not in mlflow_client.get_registered_model(name).aliases


def test_a_version_is_found_by_number_and_by_alias_with_its_gates(deployments, name):
    found = deployments.find_version(name, "1")
    assert found == {
        "version": "1",
        "digest": "1" * 64,
        "gates": {"validation_loss": "3.1 <= 6 holds"},
    }
    assert deployments.find_version(name, "champion")["version"] == "2"
    assert deployments.find_version(name, "9") is None and deployments.find_version("nobody", "1") is None


def test_a_registry_that_is_away_says_that_the_change_is_done(name):
    away = MlflowDeployments(uri=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TrackingError, match="is done and in the store"):
        away.record_deployment(event_of(name, source="2", target="1"))
