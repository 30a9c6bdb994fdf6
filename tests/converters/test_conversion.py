"""A checkpoint becomes a Flax model directory that computes the same, completely or not at all, and comes back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import converters.conversion
from converters.conversion import convert
from converters.exporting import export
from converters.manifest import ConversionManifest
from pipeline.errors import ArtifactError, ConversionError, StoreError
from pipeline.models.checkpoint import load_model, read_parameters

# float32 products in two orders of summation; logits here reach 60, seen 7e-7 of that.
RELATIVE_LOGIT_TOLERANCE = 1e-5


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def assert_same_bits(ours, theirs, name):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("tie", [True, False])
def test_flax_computes_what_torch_computes(llama, checkpoint, tmp_path, tie):
    model = llama(tie_word_embeddings=tie)
    convert(checkpoint(model), to=tmp_path / "flax")
    tokens = np.random.default_rng(0).integers(0, 101, size=(3, 29)).astype(np.int32)
    theirs = logits_of(model, tokens)
    ours = np.asarray(load_model(tmp_path / "flax", dtype="float32")(tokens))
    assert np.abs(ours - theirs).max() < RELATIVE_LOGIT_TOLERANCE * np.abs(theirs).max()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact_and_transformers_loads_it(llama, checkpoint, tmp_path, tie, dtype):
    model = llama(tie_word_embeddings=tie).to(dtype)
    convert(checkpoint(model), to=tmp_path / "flax")
    export(tmp_path / "flax", to=tmp_path / "back")
    back, state = load_file(tmp_path / "back" / "model.safetensors"), model.state_dict()
    assert set(state) - set(back) == ({"lm_head.weight"} if tie else set())
    for name, value in back.items():
        assert_same_bits(value, state[name], name)
    model.save_pretrained(tmp_path / "theirs")
    theirs, reloaded = (LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("theirs", "back"))
    tokens = np.arange(10, dtype=np.int32)[None]
    assert (logits_of(reloaded.eval(), tokens) == logits_of(theirs.eval(), tokens)).all()


def test_cast_up_comes_back_bit_exact_through_the_manifest(llama, checkpoint, tmp_path):
    model = llama().to(torch.bfloat16)
    manifest = convert(checkpoint(model), to=tmp_path / "flax", dtype="float32")
    leaves = read_parameters(tmp_path / "flax" / "params")
    assert {str(leaf.dtype) for leaf in leaves.values()} == {"float32"}
    assert all(conversion.is_exact for conversion in manifest.tensors)
    export(tmp_path / "flax", to=tmp_path / "back")
    for name, value in load_file(tmp_path / "back" / "model.safetensors").items():
        assert_same_bits(value, model.state_dict()[name], name)


def test_cast_down_is_recorded_as_rounding(llama, checkpoint, tmp_path):
    manifest = convert(checkpoint(llama()), to=tmp_path / "flax", dtype="bfloat16")
    assert not any(conversion.is_exact for conversion in manifest.tensors)
    assert "Cast(before='float32', after='bfloat16')" in manifest.tensors[0].operations
    assert any("20 of 20 tensors were rounded by the cast" in warning for warning in manifest.warnings)


def test_dtype_the_config_does_not_say_is_a_warning(llama, checkpoint, tmp_path):
    manifest = convert(checkpoint(llama(), dtype="bfloat16"), to=tmp_path / "flax")
    assert "config.json says dtype bfloat16, the checkpoint holds float32" in manifest.warnings


def test_mixed_dtypes_are_kept_tensor_by_tensor_c14(llama, checkpoint, tmp_path):
    model = llama()
    state = dict(model.state_dict())
    state["model.norm.weight"] = torch.ones(48, dtype=torch.float16)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
    convert(checkpoint(model, state=state), to=tmp_path / "flax")
    leaves = read_parameters(tmp_path / "flax" / "params")
    assert str(leaves["norm.scale"].dtype) == "float16"
    assert (leaves["norm.scale"] == 1.0).all()
    assert str(leaves["layers.0.mlp.up_proj.kernel"].dtype) == "bfloat16"
    assert str(leaves["layers.1.mlp.up_proj.kernel"].dtype) == "float32"


def test_wrapper_prefixes_are_removed_c15(llama, checkpoint, tmp_path):
    model = llama()
    state = {}
    for name, value in model.state_dict().items():
        wrapped = name.replace("model.layers.0.", "model.layers.0._checkpoint_wrapped_module.")
        state[f"_orig_mod.{wrapped}"] = value
    manifest = convert(checkpoint(model, state=state), to=tmp_path / "flax")
    tensors = {tensor.name: tensor.stored_name for conversion in manifest.tensors for tensor in conversion.sources}
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[name] == "_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"


def test_safetensors_directory_converts_like_a_checkpoint(llama, checkpoint, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    first = convert(tmp_path / "hf", to=tmp_path / "one")
    second = convert(checkpoint(model), to=tmp_path / "two")
    assert first.source_format == "safetensors"
    digests = [
        {tensor.name: tensor.sha256 for conversion in manifest.tensors for tensor in conversion.sources}
        for manifest in (first, second)
    ]
    assert digests[0] == digests[1]


def test_one_extra_and_one_missing_tensor_are_named_together(llama, checkpoint, tmp_path):
    model = llama()
    state = dict(model.state_dict())
    state["model.layers.0.mlp.up_proj.wieght"] = state.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ConversionError) as caught:
        convert(checkpoint(model, state=state), to=tmp_path / "flax")
    text = str(caught.value)
    assert "2 complaints" in text
    assert "model.layers.0.mlp.up_proj.wieght: no rule takes it" in text
    assert "found (72, 48) float32; nearest rule: model.layers.{layer}.mlp.up_proj.weight" in text
    assert "layers.0.mlp.up_proj.kernel: nothing fills it (shape (48, 72))" in text
    assert not (tmp_path / "flax").exists()


def test_config_of_another_size_is_refused_by_shape(llama, checkpoint, tmp_path):
    with pytest.raises(ConversionError) as caught:
        convert(checkpoint(llama(), vocab_size=104, num_key_value_heads=4), to=tmp_path / "flax")
    assert "model.embed_tokens.weight (101, 48) float32: gives embed_tokens.embedding the shape" in str(caught.value)
    assert "layers.1.attention.v_proj.kernel the shape (48, 12), expected (48, 24)" in str(caught.value)


def test_manifest_is_written_and_read_back_and_always_the_same(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    manifest = convert(directory, to=tmp_path / "one")
    convert(directory, to=tmp_path / "two")
    assert ConversionManifest.read(tmp_path / "one") == manifest
    texts = [(tmp_path / name / "conversion.json").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]
    assert manifest.num_parameters == sum(p.numel() for p in llama().parameters())
    assert manifest.num_bytes == 4 * manifest.num_parameters


def test_damaged_manifest_is_named(tmp_path):
    (tmp_path / "conversion.json").write_text('{"converter_version": 2}')
    with pytest.raises(ArtifactError, match="not a conversion record: KeyError"):
        ConversionManifest.read(tmp_path)
    (tmp_path / "conversion.json").write_text('{"converter_version": 99}')
    with pytest.raises(ArtifactError, match="converter version 99"):
        ConversionManifest.read(tmp_path)


def test_model_files_travel_along(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    convert(directory, to=tmp_path / "flax")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "flax" / name).read_bytes() == (directory / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "flax").iterdir()) == [
        "config.json",
        "conversion.json",
        "params",
        "tokenizer.json",
    ]


def test_directory_with_files_is_left_alone(llama, checkpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years")
    with pytest.raises(ConversionError, match="exists and is not empty"):
        convert(checkpoint(llama()), to=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "ten years"
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_empty_directory_is_taken(llama, checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    convert(checkpoint(llama()), to=tmp_path / "out")
    assert (tmp_path / "out" / "params").is_dir()


def test_failure_while_writing_leaves_nothing(llama, checkpoint, tmp_path, monkeypatch):
    directory = checkpoint(llama())
    before = sorted(tmp_path.iterdir())

    def full_disk(target, **given):
        target.mkdir()
        (target / "half").write_text("written")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converters.conversion, "write_parameters", full_disk)
    with pytest.raises(StoreError, match=r"flax: cannot be written: .*No space left on device; nothing was left"):
        convert(directory, to=tmp_path / "flax")
    assert sorted(tmp_path.iterdir()) == before


def test_missing_config_is_named(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    (directory / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"config\.json"):
        convert(directory, to=tmp_path / "flax")


def test_progress_counts_every_tensor(llama, checkpoint, tmp_path):
    told = []
    convert(checkpoint(llama()), to=tmp_path / "flax", progress=lambda done, total: told.append((done, total)))
    assert told == [(n, 20) for n in range(1, 21)]


def test_record_is_plain_json(llama, checkpoint, tmp_path):
    convert(checkpoint(llama()), to=tmp_path / "flax")
    record = json.loads((tmp_path / "flax" / "conversion.json").read_text())
    entry = next(t for t in record["tensors"] if t["sources"][0]["name"] == "model.layers.1.self_attn.k_proj.weight")
    assert entry["targets"] == [{"path": "layers.1.attention.k_proj.kernel", "shape": [48, 12], "dtype": "float32"}]
    assert entry["operations"] == ["Transpose(axes=(1, 0))"]
    assert record["facts"]["rope_layout"] == "half-split"
