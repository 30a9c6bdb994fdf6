"""What goes out is what `save_pretrained` writes, bit for bit; what is refused is refused before a file is written."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from decoder_models import CASES, tiny_decoder
from safetensors.numpy import load_file
from tiny_encoders import MODELS, tiny
from transformers import AutoModelForCausalLM

from converters.conversion import convert
from converters.exporting import EXPORTERS, export
from converters.flax_source import FlaxSource
from pipeline.errors import ArtifactError, ConversionError, UsageError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, read_parameters, save_parameters

FAMILIES = (*MODELS, *CASES)


def made(case):
    return tiny(case) if case in MODELS else tiny_decoder(case)


def assert_same_files(first, second):
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype), name
        assert ours[name].tobytes() == array.tobytes(), name
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_comes_back_as_it_was_saved(tmp_path, case):
    made(case).save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", to=tmp_path / "flax", via="family")
    record = export(tmp_path / "flax", to=tmp_path / "back")
    assert_same_files(tmp_path / "back", tmp_path / "saved")
    assert record.source_format == "flax"
    assert record.warnings == ()


@pytest.fixture(scope="module")
def flax_model(tmp_path_factory):
    """A Llama in bfloat16 but for one tensor in float32, converted to float32."""
    root = tmp_path_factory.mktemp("exporting")
    model = tiny_decoder("llama")
    for name, parameter in model.named_parameters():
        if "up_proj" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(root / "saved")
    convert(root / "saved", to=root / "flax", dtype="float32")
    return root


def test_original_dtypes_come_back_tensor_by_tensor(flax_model, tmp_path):
    record = export(flax_model / "flax", to=tmp_path / "back")
    assert_same_files(tmp_path / "back", flax_model / "saved")
    assert record.facts["dtypes"] == ["bfloat16", "float32"]
    assert record.warnings == ()


def test_another_dtype_is_written_where_asked_and_said_in_the_config(flax_model, tmp_path):
    record = export(flax_model / "flax", to=tmp_path / "back", dtype="bfloat16")
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert record.warnings == ("2 of 20 tensors were rounded by the cast",)


def test_shards_and_their_index_are_those_that_transformers_loads(flax_model, tmp_path):
    record = export(flax_model / "flax", to=tmp_path / "back", dtype="float32", max_shard_bytes=30_000)
    shards = [name for name in record.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert f"model-00001-of-{len(shards):05d}.safetensors" in shards
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(flax_model / "saved", dtype=torch.float32)(tokens).logits
    assert torch.equal(ours, theirs)


def test_a_checkpoint_goes_out_without_a_flax_model_and_without_wrappers(llama, checkpoint, tmp_path):
    model = llama()
    state = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    record = export(checkpoint(model, state=state), to=tmp_path / "back")
    assert record.source_format == "torch-dcp"
    model.save_pretrained(tmp_path / "saved")
    back, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "saved"))
    assert back.keys() == saved.keys()  # the tied head is left out, as `save_pretrained` does
    assert all(back[name].tobytes() == saved[name].tobytes() for name in saved)


def test_weights_that_were_trained_further_go_out(flax_model, tmp_path):
    leaves = read_parameters(flax_model / "flax" / PARAMETERS_DIRECTORY)
    leaves["layers.1.mlp.up_proj.kernel"] = leaves["layers.1.mlp.up_proj.kernel"] * 2
    directory = tmp_path / "trained"
    directory.mkdir()
    for name in ("config.json", "conversion.json"):
        (directory / name).write_bytes((flax_model / "flax" / name).read_bytes())
    save_parameters(directory / PARAMETERS_DIRECTORY, leaves)
    export(directory, to=tmp_path / "back")
    back, saved = (load_file(path / "model.safetensors") for path in (tmp_path / "back", flax_model / "saved"))
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(back.pop(name), saved.pop(name) * 2)
    assert all(back[other].tobytes() == saved[other].tobytes() for other in saved)


def test_unknown_format_names_the_nearest(flax_model, tmp_path):
    with pytest.raises(UsageError, match=r"no export format 'safetensor'; allowed: safetensors, onnx, stablehlo"):
        export(flax_model / "flax", to=tmp_path / "back", format="safetensor")


@pytest.mark.parametrize("format", sorted(EXPORTERS))
def test_a_directory_with_files_is_left_alone(flax_model, tmp_path, format):
    (tmp_path / "thesis.txt").write_text("ten years")
    with pytest.raises(ConversionError, match="exists and is not empty"):
        export(flax_model / "flax", to=tmp_path, format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_leaves_that_are_not_those_of_the_record_are_refused(flax_model, tmp_path):
    directory = tmp_path / "flax"
    directory.mkdir()
    for name in ("config.json", "conversion.json"):
        (directory / name).write_bytes((flax_model / "flax" / name).read_bytes())
    leaves = read_parameters(flax_model / "flax" / PARAMETERS_DIRECTORY)
    leaves["norm.scale"] = leaves["norm.scale"][:-1]
    save_parameters(directory / PARAMETERS_DIRECTORY, leaves)
    with pytest.raises(ArtifactError, match=r"norm\.scale: float32 \[48\], stored is float32 \[47\]"):
        export(directory, to=tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flax"]


def test_flax_directories_are_recognised(flax_model):
    assert FlaxSource.recognises(flax_model / "flax")
    assert not FlaxSource.recognises(flax_model / "saved")
