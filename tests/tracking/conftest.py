import os

import pytest
from browser import chromium

from pipeline.tracking.mlflow_tracker import sqlite_uri, store_tracker


@pytest.fixture(scope="session")
def mlflow_store(tmp_path_factory):
    """One SQLite store for the folder's tests (its schema takes a second); tests differ by run id and experiment."""
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture
def mlflow_client(mlflow_store):
    from mlflow.tracking import MlflowClient

    uri = sqlite_uri(mlflow_store)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@pytest.fixture
def mlflow_tracker(mlflow_store):
    tracker = store_tracker(mlflow_store, sample_seconds=0)
    yield tracker
    tracker.close(timeout_seconds=30)
    assert tracker.last_error == ""


@pytest.fixture(scope="module")
def page():
    if chromium.find_chromium() is None:
        assert os.environ.get("PIPELINE_REQUIRE_BROWSER") != "1", "PIPELINE_REQUIRE_BROWSER=1, but there is no Chromium"
        pytest.skip("no Chromium on this machine")
    with chromium.open_page() as opened:
        yield opened
