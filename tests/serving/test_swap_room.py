"""A version is swapped in only where its parameters have room beside those that serve."""

import dataclasses
from types import SimpleNamespace

import psutil
import pytest

from pipeline.errors import ParameterError
from pipeline.serving.accelerator.device import choose_placement
from pipeline.serving.accelerator.memory import RUNTIME_BYTES
from pipeline.serving.hosting import hosted_model
from pipeline.serving.hosting.hosted_model import HostedModel, check_memory, digest_of_surroundings
from pipeline.serving.hosting.loading_plan import plan_loading
from pipeline.serving.hosting.served_model import ServedModel
from pipeline.serving.replica_settings import ReplicaSettings


@pytest.fixture
def hosted(model_directory, monkeypatch):
    monkeypatch.setattr("pipeline.serving.hosting.loading_plan.bandwidth_of", lambda device, **_: 20e9)
    settings = ReplicaSettings(
        name="tiny",
        model_path=str(model_directory),
        digest="a" * 64,
        version="1",
        deployment_id="a",
        slots=2,
        context=64,
        prefill_chunk_tokens=16,
        decode_steps=4,
    )
    _, placement = choose_placement(device="cpu", dtype="float32")
    served = ServedModel(
        engine=None,
        endpoint="completions",
        facts={},
        make_surface=lambda facts: None,
        leaves_of=lambda model: {},
        swap=lambda leaves, label: {},
    )
    return HostedModel(
        settings,
        served=served,
        facts=dict(plan_loading(settings).facts),
        placement=placement,
        surroundings=digest_of_surroundings(model_directory),
    )


def test_a_full_device_sends_the_next_version_elsewhere_and_says_why(hosted, monkeypatch):
    following = dataclasses.replace(hosted.settings, digest="b" * 64, version="2", deployment_id="b")
    assert hosted.why_no_swap(following) is None  # a CPU has no limit of its own
    needed = hosted.facts["weight_bytes"]
    monkeypatch.setattr(hosted_model, "allocator_room", lambda device: needed)
    assert hosted.why_no_swap(following) is None
    monkeypatch.setattr(hosted_model, "allocator_room", lambda device: needed - 1)
    assert "beside those that serve" in hosted.why_no_swap(following)


def test_memory_is_held_against_what_int8_takes_and_not_against_what_is_stored(model_directory, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=RUNTIME_BYTES + 100_000))
    with pytest.raises(ParameterError, match="weights while loading"):
        check_memory(model_directory)
    check_memory(model_directory, num_bytes=50_000)
