"""The history of a deployment is append-only and enough to go back."""

import json

import pytest

from pipeline.artifacts.store import open_store
from pipeline.errors import StoreError
from pipeline.serving.replica_settings import ReplicaSettings, read_settings
from pipeline.serving.rollout.deployment_record import (
    DeploymentEvent,
    VersionReference,
    append_event,
    deployment_events,
    deployment_names,
    find_version,
    operator,
    recorded_settings,
    version_before,
)


def event_of(number, digest, *, when, action="deploy", source=None, name="tiny"):
    return DeploymentEvent(
        name=name,
        action=action,
        when=when,
        who="ana@host",
        source=source,
        target=VersionReference(version=number, digest=digest),
        how="swapped",
        seconds=0.25,
        gates={"validation_loss": "3.1 <= 6 holds"},
        registered_model="tiny",
    )


def test_events_come_back_as_they_were_written_in_the_order_of_time(tmp_path):
    store = open_store(str(tmp_path))
    first = event_of("1", "a" * 64, when=1000.0)
    second = event_of("2", "b" * 64, when=1000.5, source=first.target, action="promote")
    append_event(store, second)
    append_event(store, first)
    assert deployment_events(store, "tiny") == [first, second]
    assert deployment_names(store) == ["tiny"]
    assert deployment_events(store, "other") == []


def test_two_events_of_one_moment_are_both_kept(tmp_path):
    store = open_store(str(tmp_path))
    event = event_of("1", "a" * 64, when=1000.0)
    assert append_event(store, event) != append_event(store, event)
    assert deployment_events(store, "tiny") == [event, event]


def test_a_damaged_event_is_named(tmp_path):
    store = open_store(str(tmp_path))
    store.write("deployments/tiny/events/20260101T000000.000000Z-000000.json", b'{"name": "tiny"}')
    with pytest.raises(StoreError, match=r"events/20260101T000000"):
        deployment_events(store, "tiny")


def test_the_version_before_is_the_last_other_one():
    one, two, three = ("a" * 64, "b" * 64, "c" * 64)
    events = [event_of(number, digest, when=float(number)) for number, digest in (("1", one), ("2", two), ("3", three))]
    assert version_before(events, current_digest=three).target.version == "2"
    again = [*events, event_of("2", two, when=4.0, action="rollback")]
    assert version_before(again, current_digest=two).target.version == "3"
    assert version_before(events[:1], current_digest=one) is None
    trial = event_of("1", one, when=1.5, action="canary")  # its target is the champion, its gates the challenger's
    assert version_before([events[0], trial, events[1]], current_digest=two) == events[0]
    assert find_version([events[0], trial], "1") == [events[0]]


def test_a_version_is_found_by_name_or_by_the_beginning_of_its_digest():
    events = [event_of("1", "abcd" + "0" * 60, when=1.0), event_of("2", "abce" + "0" * 60, when=2.0)]
    assert [found.target.version for found in find_version(events, "2")] == ["2"]
    assert [found.target.version for found in find_version(events, "abcd")] == ["1"]
    assert find_version(events, "abc") == []  # too short to mean a digest
    assert find_version(events, "9") == []
    newer = event_of("1", "abcd" + "0" * 60, when=3.0)
    assert find_version([*events, newer], "1") == [newer]


def test_the_recorded_settings_bring_the_version_back_and_name_nobody_who_may_ask():
    settings = ReplicaSettings(
        name="tiny",
        model_path="/models/1",
        digest="a" * 64,
        version="1",
        deployment_id="x",
        slots=2,
        context=64,
        prefill_chunk_tokens=16,
        decode_steps=2,
        dimensions={"width": 4},
        api_key_digests=("d" * 64,),
    )
    kept = json.loads(json.dumps(recorded_settings(settings)))
    assert "d" * 64 not in json.dumps(kept)
    back = read_settings(kept)
    assert (back.model_path, back.slots, back.dimensions, back.api_key_digests) == ("/models/1", 2, {"width": 4}, ())


def test_the_operator_is_a_user_at_a_host():
    user, _, host = operator().partition("@")
    assert user and host
