import json
import uuid
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from sample_run import llm_run

from pipeline.cli.models import find_model
from pipeline.errors import FailureClass, TrackingError
from pipeline.tracking.mlflow_registry import MlflowRegistry
from pipeline.tracking.mlflow_tracker import sqlite_uri
from pipeline.tracking.mlflow_ui import free_port


@pytest.fixture
def registry(mlflow_store):
    return MlflowRegistry(uri=sqlite_uri(mlflow_store))


@pytest.fixture
def name():
    return f"model-{uuid.uuid4().hex[:8]}"


def register(registry, name, *, fingerprint, alias="champion", run_id="run-1"):
    return registry.register(
        name=name,
        source="/models/x",
        tags={"pipeline.run_id": run_id, "pipeline.fingerprint": fingerprint, "uri": "s3://u:hunter2@b"},
        alias=alias,
        description="why",
    )


def test_a_version_keeps_source_tags_and_description(registry, mlflow_client, name):
    made = register(registry, name, fingerprint="a")
    found = mlflow_client.get_model_version(name, made.version)
    assert (found.source, found.description, found.tags["uri"]) == ("/models/x", "why", "s3://u:***@b")
    assert str(mlflow_client.get_model_version_by_alias(name, "champion").version) == "1"


def test_moves_of_an_alias_are_recorded_on_both_versions(registry, mlflow_client, name):
    register(registry, name, fingerprint="a", run_id="run-1")
    register(registry, name, fingerprint="b", run_id="run-2")
    register(registry, name, fingerprint="b", run_id="run-2")
    moves = {
        version: [
            json.loads(value)
            for key, value in sorted(mlflow_client.get_model_version(name, version).tags.items())
            if key.startswith("alias_move.champion.")
        ]
        for version in ("1", "2")
    }
    assert [(move["from"], move["to"], move["run_id"]) for move in moves["1"]] == [
        (None, "1", "run-1"),
        ("1", "2", "run-2"),
    ]
    assert moves["2"] == moves["1"][1:]
    assert all(move["who"] and move["when"] for move in moves["1"])


def test_without_an_alias_none_moves(registry, mlflow_client, name):
    register(registry, name, fingerprint="a")
    made = register(registry, name, fingerprint="b", alias=None)
    assert (made.version, made.alias) == ("2", None)
    assert str(mlflow_client.get_model_version_by_alias(name, "champion").version) == "1"


def test_a_version_links_to_the_mlflow_parent_run(mlflow_tracker, mlflow_client, name):
    run = replace(llm_run(), run_id=f"run-{uuid.uuid4().hex[:8]}", flow="registering")
    mlflow_tracker.start_run(run)
    made = register(mlflow_tracker.registry, name, fingerprint="a", run_id=run.run_id)
    linked = mlflow_client.get_model_version(name, made.version).run_id
    assert mlflow_client.get_run(linked).data.tags["pipeline.run_id"] == run.run_id


def test_a_version_and_an_alias_lead_to_the_source(registry, name, tmp_path):
    register(registry, name, fingerprint="a")
    assert registry.source(f"models:/{name}/1", cache=tmp_path) == "/models/x"
    assert registry.source(f"models:/{name}@champion", cache=tmp_path) == "/models/x"


def test_a_command_finds_the_model_of_a_version(registry, name, tmp_path, mlflow_store, monkeypatch):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri(mlflow_store))
    registry.register(name=name, source=str(tmp_path), tags={}, alias="best", description="")
    assert find_model(f"models:/{name}@best") == tmp_path


@pytest.mark.parametrize("uri", ["models:/{name}/7", "models:/{name}@nobody", "models:/absent/1"])
def test_a_version_that_is_not_there_is_named(registry, name, tmp_path, uri):
    register(registry, name, fingerprint="a")
    uri = uri.format(name=name)
    with pytest.raises(TrackingError, match=f"{uri}: the model registry at .* does not give it"):
        registry.source(uri, cache=tmp_path)


def test_what_is_no_version_is_refused_with_the_form(registry, tmp_path):
    with pytest.raises(TrackingError, match="allowed: models:/NAME/VERSION or models:/NAME@ALIAS"):
        registry.source("models:/only-a-name", cache=tmp_path)


def test_a_refusal_says_what_was_refused(registry):
    with pytest.raises(TrackingError, match="refused"):
        registry.register(name="m" * 400, source="s", tags={}, alias="v1", description="")


def test_a_registry_that_is_away_is_an_infrastructure_error_with_a_hint(name):
    registry = MlflowRegistry(uri=f"http://u:hunter2@127.0.0.1:{free_port()}")
    with pytest.raises(TrackingError) as caught:
        register(registry, name, fingerprint="a")
    assert caught.value.failure_class is FailureClass.INFRA
    assert "away" in str(caught.value)
    assert "hint: start the tracking server" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_deleted_version_is_not_there(registry, mlflow_client, name):
    version = register(registry, name, fingerprint="a").version
    assert registry.has(name=name, version=version)
    assert not registry.has(name=name, version="99")
    assert not registry.has(name="nosuch", version="1")
    mlflow_client.delete_model_version(name, version)
    assert not registry.has(name=name, version=version)
