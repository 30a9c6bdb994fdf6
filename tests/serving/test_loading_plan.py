"""What is decided about a model before a byte of its weights is read."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from pipeline.errors import ArtifactError, ParameterError, PipelineError
from pipeline.models.checkpoint import model_leaves
from pipeline.models.registry import describe
from pipeline.serving.accelerator.host_memory import available_bytes
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.temporaries import largest_temporaries
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.hosting import loading_plan
from pipeline.serving.hosting.loading_plan import limits_of, memory_limit, plan_loading
from pipeline.serving.replica_settings import ReplicaSettings

MIB, GIB = 2**20, 2**30


@pytest.fixture(autouse=True)
def steady_bandwidth(monkeypatch):
    """Measuring takes half a second and is tested elsewhere."""
    monkeypatch.setattr(loading_plan, "bandwidth_of", lambda device, **_: 20e9)


def settings_of(directory, **changes):
    made = ReplicaSettings(
        name="tiny",
        model_path=str(directory),
        digest="d" * 64,
        version="1",
        deployment_id="a",
        slots=None,
        context=None,
        prefill_chunk_tokens=32,
        decode_steps=4,
    )
    return dataclasses.replace(made, **changes)


def test_what_the_flow_leaves_open_is_filled_in_and_shown(model_directory):
    plan = plan_loading(settings_of(model_directory))
    assert (plan.settings.slots, plan.settings.context) == (8, 160)
    facts = plan.facts
    assert facts["dtype"] == "float32" and facts["slots"] == 8 and facts["warnings"] == []
    assert "8 slots x 160 tokens" in facts["memory_reason"]
    assert facts["estimated_per_second"] > 1000 and "20.0 GB/s" in facts["estimate_reason"]


def test_an_int8_model_is_quantized_as_it_is_loaded_and_computes_in_float32(model_directory):
    plan = plan_loading(settings_of(model_directory, dtype="int8"))
    assert "saves memory, not time" in plan.facts["warnings"][0]
    leaves = model_leaves(plan.load(model_directory))
    assert {str(leaf.dtype) for leaf in leaves.values()} == {"int8", "float32"}
    assert leaves["layers.0.mlp.down_proj.kernel"].dtype == "int8"


def test_memory_that_is_short_makes_fewer_slots_and_asks_the_compiler(model_directory, monkeypatch):
    asked = []
    weights = 45_216 * 4
    monkeypatch.setattr(loading_plan, "available_bytes", lambda: loading_plan.RUNTIME_BYTES + weights + 760_000)
    monkeypatch.setattr(
        loading_plan, "largest_temporaries", lambda model, *, limits, **_: asked.append(limits.slots) or 100_000
    )
    plan = plan_loading(settings_of(model_directory, context=160))
    per_slot = 160 * 2 * 2 * 2 * 16 * 4
    assert plan.settings.slots == 5 and per_slot == 81_920
    assert asked == [7, 5]
    assert "temporaries" in plan.facts["memory_reason"]
    assert "less 0.00 GiB for the parameters of a next version" in plan.facts["memory_reason"]
    assert plan.facts["weight_bytes"] == weights and plan.facts["warnings"] == []


def test_room_for_a_next_version_is_given_up_before_the_model_is_refused(model_directory, monkeypatch):
    monkeypatch.setattr(loading_plan, "available_bytes", lambda: loading_plan.RUNTIME_BYTES + 440_000)
    monkeypatch.setattr(loading_plan, "largest_temporaries", lambda *_, **__: 1000)
    plan = plan_loading(settings_of(model_directory, context=160))
    assert plan.settings.slots == 3
    assert "no room for the parameters of a next version" in plan.facts["warnings"][0]


def test_what_cannot_fit_and_what_would_crawl_are_refused_before_anything_is_read(model_directory, monkeypatch):
    (model_directory / "params").rename(model_directory / "elsewhere")  # nothing is read
    with pytest.raises(ParameterError, match=r"absurdly slowly here: 0\.0 GB/s .* min_tokens_per_second is 0\.5"):
        monkeypatch.setattr(loading_plan, "bandwidth_of", lambda device, **_: 1000.0)
        plan_loading(settings_of(model_directory, min_tokens_per_second=0.5))
    monkeypatch.setattr(loading_plan, "bandwidth_of", lambda device, **again: 20e9 if again.get("again") else 1000.0)
    monkeypatch.setattr(loading_plan, "available_bytes", lambda: 0)
    with pytest.raises(ParameterError, match=r"does not fit: 0\.00 GiB of weights .* of 0\.00 GiB"):
        plan_loading(settings_of(model_directory, slots=4, context=64, min_tokens_per_second=0.5))


def test_the_limit_is_the_allocators_own_or_the_models_part_of_it():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100 * MIB, "bytes_in_use": 30 * MIB})
    assert memory_limit(device, part=1.0)[0] == 70 * MIB
    limit, source = memory_limit(device, part=0.25)
    assert limit == 25 * MIB and "serves several models" in source
    assert memory_limit(device, part=0.9)[0] == 70 * MIB


def test_the_compiler_says_what_the_largest_executables_take(model_directory):
    settings = settings_of(model_directory)
    size = largest_temporaries(
        describe(model_directory).abstract(),
        limits=limits_of(settings, slots=16, context=160),
        buckets=Buckets(decode_batches=(16,), decode_attention=(160,), chunks=(8,), prefill_attention=(160,)),
        device=jax.devices("cpu")[0],
        dtype="float32",
    )
    logits = 16 * 320 * 4  # of the batch, which the loop over steps carries
    assert logits < size < 100 * logits


def test_a_container_s_limit_counts_as_well_as_the_machine_s(tmp_path):
    assert available_bytes(cgroup=tmp_path / "absent") > 0
    for name, text in (("max", "1000000"), ("current", "600000"), ("stat", "anon 5\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes(cgroup=tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(cgroup=tmp_path) == pytest.approx(available_bytes(cgroup=tmp_path / "absent"), rel=0.2)


def broken_description(directory):
    (directory / "config.json").write_text('{"model_type": "lama"}')


def broken_parameters(directory):
    largest = max((directory / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:50])


def other_tokenizer(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


def load_everything(directory):
    plan = plan_loading(settings_of(directory))
    read_tokenizer(directory, num_tokens=json.loads((directory / "config.json").read_text())["vocab_size"])
    plan.load(directory)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (broken_description, ParameterError),
        (broken_parameters, ArtifactError),
        (other_tokenizer, ArtifactError),
        (lambda directory: (directory / "tokenizer.json").unlink(), ArtifactError),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), ArtifactError),
        (lambda directory: (directory / "config.json").unlink(), ArtifactError),
    ],
)
def test_every_error_of_loading_is_ours_and_says_what_to_do(model_directory, damage, kind):
    damage(model_directory)
    with pytest.raises(PipelineError) as caught:
        load_everything(model_directory)
    assert type(caught.value) is kind
    assert caught.value.hint, caught.value


def test_devices_of_a_processor_share_its_memory_and_hosts_have_their_own(model_directory):
    def reason(**mesh):
        return plan_loading(settings_of(model_directory, slots=8, context=128, **mesh)).facts["memory_reason"]

    # 2 layers x 2 x 2 heads of 16 in float32 are 512 bytes a token.
    assert "8 slots x 128 tokens x 512 bytes" in reason()
    assert "8 slots x 128 tokens x 512 bytes" in reason(mesh_tensor=2, mesh_data=2)
    # Four devices and two heads: each head is there twice.
    assert "8 slots x 128 tokens x 1024 bytes" in reason(mesh_tensor=4)
    # Two processes with half of it each.
    assert "8 slots x 128 tokens x 256 bytes" in reason(mesh_tensor=2, mesh_hosts=2)
