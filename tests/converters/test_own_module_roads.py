"""A module of the user's own goes in by tracing, and out again in every format."""

import json

import jax
import numpy as np
import onnxruntime
import pytest
import torch
from own_modules import write_own_checkpoint
from safetensors.numpy import load_file

from converters.conversion import convert
from converters.exporting import export
from converters.manifest import ConversionManifest
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import load_model
from pipeline.models.registry import describe

# float32 sums in another order, outputs of size 10: seen 2e-6 at most.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    module = write_own_checkpoint(root / "project", root / "checkpoint", name="own_roads_module")
    manifest = convert(root / "checkpoint", to=root / "flax", project_root=root / "project")
    return root, module, manifest


def inputs_of(rows):
    random = np.random.default_rng(rows)
    return {
        "pixels": random.standard_normal((rows, 2, 6, 9), dtype=np.float32),
        "weights": random.standard_normal((rows, 7), dtype=np.float32),
    }


def torch_outputs(module, inputs):
    with torch.no_grad():
        return {
            name: value.numpy() for name, value in module(**{k: torch.from_numpy(v) for k, v in inputs.items()}).items()
        }


def test_the_road_and_its_reason_are_recorded(own):
    root, _, manifest = own
    assert manifest.road == "trace"
    assert manifest.road_reason == "module.json names a module of the user's own"
    assert manifest.family == "traced"
    assert ConversionManifest.read(root / "flax") == manifest
    assert (root / "flax" / "module.json").read_bytes() == (root / "checkpoint" / "module.json").read_bytes()
    assert not (root / "flax" / "config.json").exists()


def test_the_traced_model_computes_the_same_at_another_batch(own):
    root, module, _ = own
    description, traced = describe(root / "flax"), load_model(root / "flax", dtype=None)
    inputs = inputs_of(5)
    found = jax.jit(description.forward)(traced, inputs)
    for name, wanted in torch_outputs(module, inputs).items():
        assert np.abs(np.asarray(found[name]) - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_counters_and_weights_come_back_bit_for_bit(own, tmp_path):
    root, _, manifest = own
    export(root / "flax", to=tmp_path / "back")
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "back", root / "checkpoint"))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (array.dtype, array.tobytes()), name
    assert ours["norm.num_batches_tracked"] == 31
    assert (tmp_path / "back" / "module.json").exists()
    named = {tensor.name for tensor in (*manifest.sources, *manifest.carried)}
    assert "norm.num_batches_tracked" in named


def test_onnx_of_the_flax_model_computes_what_torch_computes(own, tmp_path):
    root, module, _ = own
    record = export(root / "flax", to=tmp_path / "onnx", format="onnx", project_root=root / "project")
    assert record.facts["inputs"]["pixels"]["shape"] == ["batch", 2, 6, 9]
    assert list(record.facts["outputs"]) == ["logits", "hidden"]
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    inputs = inputs_of(4)
    for ours, wanted in zip(
        session.run(["logits", "hidden"], inputs), torch_outputs(module, inputs).values(), strict=True
    ):
        assert np.abs(ours - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_stablehlo_of_the_traced_model_keeps_its_batch_open(own, tmp_path):
    root, _, _ = own
    record = export(root / "flax", to=tmp_path / "hlo", format="stablehlo")
    assert record.facts["inputs"]["weights"]["shape"] == ["batch", 7]
    assert json.loads((tmp_path / "hlo" / "stablehlo.json").read_text())["outputs"]["logits"]["shape"] == ["batch", 3]


def test_a_family_is_refused_for_a_module_of_the_users_own(own, tmp_path):
    root, _, _ = own
    with pytest.raises(ConversionError, match=r"module\.json, a module of the user's own, which no family describes"):
        convert(root / "checkpoint", to=tmp_path / "flax", via="family")
    assert list(tmp_path.iterdir()) == []


def test_onnx_in_bfloat16_is_refused_with_what_is_allowed(own, tmp_path):
    root, _, _ = own
    with pytest.raises(ConversionError, match="dtype bfloat16 is not written"):
        export(root / "checkpoint", to=tmp_path / "onnx", format="onnx", dtype="bfloat16")
    assert list(tmp_path.iterdir()) == []
