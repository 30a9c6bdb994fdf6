"""`pipeline deployments`, `promote` and `rollback` say what they know, and what to do where they cannot."""

import json
from dataclasses import replace

import pytest

from pipeline.artifacts.store import open_store
from pipeline.cli import deployments as verbs
from pipeline.cli.place import find_place
from pipeline.cli.trackers import default_tracking_uri
from pipeline.errors import ClusterError, UsageError
from pipeline.serving.rollout.deployment_record import (
    DeploymentEvent,
    VersionReference,
    append_event,
    deployment_events,
)
from pipeline.tracking.mlflow_registry import MlflowRegistry

NOWHERE = {"address": None, "cluster": None, "as_json": False}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in which `tiny` was served in two versions."""
    for name in ("PIPELINE_STORE", "PIPELINE_RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "store"
    versions = [VersionReference(version=number, digest=number * 64) for number in ("1", "2")]
    for index, version in enumerate(versions):
        event = DeploymentEvent(
            name="tiny",
            action="deploy" if index == 0 else "promote",
            when=1_700_000_000.0 + index,
            who="ana@host",
            source=versions[0] if index else None,
            target=version,
            how="swapped" if index else "started",
            seconds=0.5,
            gates={"validation_loss": "3.1 <= 6 holds"},
            reason="better",
            application="tiny",
            settings={"model_path": f"/models/{version.version}"},
        )
        append_event(open_store(str(path)), event)
    return str(path)


def test_what_is_remembered_is_listed_where_nothing_runs(store, capsys):
    assert verbs.deployments(name=None, store=store, **NOWHERE) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown and "stopped" in shown and "no local head runs" in shown
    assert verbs.deployments(name=None, store=store, **{**NOWHERE, "as_json": True}) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["version"], row["health"], row["running"]) == ("tiny", "2", "stopped", 0)


def test_an_empty_store_says_so(store, capsys, tmp_path):
    assert verbs.deployments(name=None, store=str(tmp_path / "empty"), **NOWHERE) == 0
    assert "no deployments" in capsys.readouterr().out


def test_the_events_of_one_are_shown_in_order(store, capsys):
    assert verbs.deployments(name="tiny", store=store, **NOWHERE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["started" in line for line in lines[1:]] == [True, False]
    for words in ("ana@host", "promote", "validation_loss 3.1 <= 6 holds", "better"):
        assert words in lines[2]
    verbs.deployments(name="tiny", store=store, **{**NOWHERE, "as_json": True})
    assert [event["target"]["version"] for event in json.loads(capsys.readouterr().out)] == ["1", "2"]


def test_an_unknown_name_gets_the_nearest_one(store):
    with pytest.raises(UsageError, match="did you mean 'tiny'") as caught:
        verbs.deployments(name="tinny", store=store, **NOWHERE)
    assert caught.value.exit_code == 2 and "there are: tiny" in str(caught.value)


@pytest.mark.parametrize("change", [verbs.promote, verbs.rollback])
def test_a_change_where_nothing_runs_is_an_infrastructure_error(store, change):
    given = {"version": "1"} if change is verbs.promote else {"to": None}
    with pytest.raises(ClusterError, match="nothing runs") as caught:
        change(name="tiny", reason="", store=store, **given, **NOWHERE)
    assert caught.value.exit_code == 3 and "pipeline run" in str(caught.value)


def test_a_version_that_nobody_knows_is_named_with_those_that_served(store):
    place, events = find_place(start=verbs.Path.cwd(), store=store), deployment_events(open_store(store), "tiny")
    with pytest.raises(UsageError, match="knows no version '9'") as caught:
        verbs._find(place, "tiny", "9", events=events)
    assert "it has served: 1, 2" in str(caught.value) and "registry has no version '9'" in str(caught.value)
    assert verbs._find(place, "tiny", "1111", events=events).model_path == "/models/1"


def test_a_registered_version_that_never_served_is_found_with_its_directory(store, monkeypatch, tmp_path):
    place = find_place(start=tmp_path, store=store)
    uri = default_tracking_uri(place)
    MlflowRegistry(uri=uri).register(
        name="llm", source="file:///models/7", tags={"gate.loss": "1 <= 2 holds"}, alias="candidate", description=""
    )
    served = VersionReference(version="x", digest="y" * 64)
    event = replace(deployment_events(open_store(store), "tiny")[0], registered_model="llm", target=served)
    for asked in ("1", "candidate"):
        found = verbs._find(
            place, "tiny", asked, events=[replace(event, target=VersionReference(version="x", digest="y"))]
        )
        assert (found.version, found.model_path, found.registered_model) == ("1", "/models/7", "llm")
        assert found.gates == {"loss": "1 <= 2 holds"} and len(found.digest) == 64
