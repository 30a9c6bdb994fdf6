"""Every encoder and vision model of transformers, with every head: there, the same, and back bit for bit.

Errors are the largest difference over the largest number, measured on these models: blocks up to 2.3e-6 (T5 v1.1, whose
scores are not scaled), outputs up to 4.3e-6 (the tanh of RoBERTa's pooler). `ParityLimits` has the limits.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_encoders import MODELS, save, tiny

import converters
from converters.flax_activations import FlaxRunner
from converters.torch_activations import torch_outputs
from converters.torch_model import load_torch_model
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import build_model, read_parameters
from pipeline.models.config_file import read_config
from pipeline.models.registry import describe_config

# Five times the limit of a block. The exact GELU read as its approximation changes Whisper's output by 1e-4, every
# other fault here by more.
SEEN = 5e-5

MUTATIONS = {
    "bert": {"layer_norm_eps": 1e-2},
    "roberta": {"pad_token_id": 5},
    "t5": {"relative_attention_max_distance": 40},
    "whisper": {"activation_function": "gelu_new"},
    "vit": {"hidden_act": "gelu_pytorch_tanh"},
    "clip": {"text_config": {"hidden_act": "gelu"}},
    "resnet early": {"downsample_in_bottleneck": False},
    "convnext": {"layer_norm_eps": 1e-2},
}
"""What a wrong reading of the config would compute: the same leaves, other values."""


@pytest.fixture
def converted(tmp_path):
    def make(case, **overrides):
        model = tiny(case, **overrides)
        checkpoint = save(model, tmp_path / "torch")
        manifest = converters.convert(checkpoint, to=tmp_path / "flax")
        return model, checkpoint, tmp_path / "flax", manifest

    return make


def stored(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("case", MODELS)
def test_model_computes_the_same_and_comes_back(case, converted, tmp_path):
    model, checkpoint, flax, manifest = converted(case)
    continues = case in ("t5", "whisper")
    report = converters.check_parity(checkpoint, flax, continued_tokens=16 if continues else 0)
    assert report.failures == ()
    assert report.road == "family"
    assert report.not_compared == ()
    assert len(report.blocks) >= 2
    if continues:
        assert all(len(row.reference) == row.matched == 16 for row in report.continuations)
        assert len(report.continuations) >= 2
    assert manifest.warnings == ("no tokenizer.json beside the checkpoint; the model can be evaluated but not prompted "
                                 "with text",)  # fmt: skip

    converters.export(flax, to=tmp_path / "back")
    before, after = stored(checkpoint), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].dtype != after[name].dtype] == []
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    returned = load_torch_model(tmp_path / "back")
    state = returned.state_dict()
    assert {name: bool(torch.equal(value, state[name])) for name, value in model.state_dict().items()} == dict.fromkeys(
        state, True
    )


@pytest.mark.parametrize("case", MUTATIONS)
def test_wrong_reading_of_the_config_is_seen(case, converted):
    _, checkpoint, flax, _ = converted(case)
    config = read_config(flax)
    for key, value in MUTATIONS[case].items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    description = describe_config(config)
    module = build_model(description, read_parameters(flax / "params"), dtype=None, source="mutated")
    inputs = describe_config(read_config(flax)).example_inputs(seed=0)
    ours = FlaxRunner(description, module).outputs(inputs)
    theirs = torch_outputs(load_torch_model(checkpoint), inputs)
    errors = [np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max() for name in ours]
    assert max(errors) > SEEN


def test_encoder_runs_once_while_the_decoder_writes(converted):
    """As users generate: encode, then decode what was written so far; transformers keeps a cache.

    Its cache has as many layers as the encoder, so both have the same number here.
    """
    model, _, flax, _ = converted("t5", num_decoder_layers=1)
    module = converters.load(flax)
    inputs = describe_config(read_config(flax)).example_inputs(seed=0)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    encoded = nnx.jit(lambda module, tokens, mask: module.encode(tokens, attention_mask=mask))(module, tokens, mask)
    decode = nnx.jit(
        lambda module, written, encoded, mask: module.decode(written, encoded=encoded, attention_mask=mask)
    )
    written = np.zeros((len(tokens), 17), np.int32)
    for place in range(16):
        written[:, place + 1] = decode(module, written, encoded, mask)[:, place].argmax(axis=-1)
    theirs = model.generate(
        torch.from_numpy(tokens).long(),
        attention_mask=torch.from_numpy(mask).long(),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
    )
    np.testing.assert_array_equal(written, theirs)


def test_declared_rounding_is_rounded_on_both_sides(tmp_path):
    checkpoint = save(tiny("vit classifier"), tmp_path / "torch")
    converters.convert(checkpoint, to=tmp_path / "flax", dtype="bfloat16")
    report = converters.check_parity(checkpoint, tmp_path / "flax")
    assert report.failures == ()
    assert len(report.tensors.rounded) == report.tensors.num_tensors


def test_running_statistics_count_and_their_counters_come_back(converted, tmp_path):
    model, _, flax, _ = converted("resnet basic")
    leaves = read_parameters(flax / "params")
    np.testing.assert_array_equal(
        leaves["embedder.normalization.var"], model.embedder.embedder.normalization.running_var
    )
    assert not any("num_batches_tracked" in leaf for leaf in leaves)
    converters.export(flax, to=tmp_path / "back")
    counters = [value for name, value in stored(tmp_path / "back").items() if name.endswith("num_batches_tracked")]
    assert len(counters) > 10
    assert {int(value) for value in counters} == {31}
    assert {value.dtype for value in counters} == {torch.int64}


def test_what_the_model_does_not_read_is_carried(converted, tmp_path):
    model = tiny("bert masked")
    checkpoint = save(model, tmp_path / "torch")
    extra = {
        "bert.pooler.dense.weight": torch.randn(48, 48),
        "bert.pooler.dense.bias": torch.randn(48),
        "cls.seq_relationship.weight": torch.randn(2, 48),
        "cls.seq_relationship.bias": torch.randn(2),
    }
    write(checkpoint, {**stored(checkpoint), **extra})
    converters.convert(checkpoint, to=tmp_path / "flax")
    converters.export(tmp_path / "flax", to=tmp_path / "back")
    back = stored(tmp_path / "back")
    assert all(torch.equal(back[name], value) for name, value in extra.items())


def test_norms_of_the_first_checkpoints_keep_their_names(tmp_path):
    checkpoint = save(tiny("bert masked"), tmp_path / "torch")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in stored(checkpoint).items()
    }
    write(checkpoint, old)
    converters.convert(checkpoint, to=tmp_path / "flax")
    converters.export(tmp_path / "flax", to=tmp_path / "back")
    assert stored(tmp_path / "back").keys() == old.keys()
    assert "bert.embeddings.LayerNorm.gamma" in old


def test_vit_is_read_by_the_names_of_its_module_too(tmp_path):
    model = tiny("vit classifier")
    checkpoint = save(model, tmp_path / "disk")
    converters.convert(checkpoint, to=tmp_path / "from-disk")
    write(checkpoint, dict(model.state_dict()))
    manifest = converters.convert(checkpoint, to=tmp_path / "from-module")
    assert manifest.facts["names"] == "module"
    ours, theirs = (read_parameters(tmp_path / name / "params") for name in ("from-disk", "from-module"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


def test_base_model_is_read_from_a_checkpoint_of_the_whole(tmp_path):
    checkpoint = save(tiny("bert"), tmp_path / "torch")
    write(checkpoint, {f"bert.{name}": value for name, value in stored(checkpoint).items()})
    manifest = converters.convert(checkpoint, to=tmp_path / "flax")
    assert manifest.num_target_leaves == 39


def test_missing_pooler_is_told_with_the_remedy(tmp_path):
    checkpoint = save(tiny("bert"), tmp_path / "torch")
    write(checkpoint, {name: value for name, value in stored(checkpoint).items() if "pooler" not in name})
    with pytest.raises(ConversionError, match="add_pooling_layer: false") as caught:
        converters.convert(checkpoint, to=tmp_path / "flax", via="family")
    assert "pooler.kernel" in str(caught.value)


def test_flan_as_transformers_5_saves_it_is_told_with_the_remedy(tmp_path):
    model = tiny("t5 v1.1")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    checkpoint = save(model, tmp_path / "torch")
    assert {"shared.weight", "lm_head.weight"} <= stored(checkpoint).keys()
    with pytest.raises(ConversionError, match="tie_word_embeddings"):
        converters.convert(checkpoint, to=tmp_path / "flax", via="family")


def test_t5_with_a_head_of_its_own_computes_the_same(tmp_path):
    model = tiny("t5 v1.1")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    checkpoint = save(model, tmp_path / "torch")
    text = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    converters.convert(checkpoint, to=tmp_path / "flax")
    report = converters.check_parity(checkpoint, tmp_path / "flax", continued_tokens=0)
    assert report.failures == ()


def test_torch_model_has_the_class_that_the_config_names(tmp_path):
    checkpoint = save(tiny("bert spans"), tmp_path / "torch")
    assert type(load_torch_model(checkpoint)) is transformers.BertForQuestionAnswering


@pytest.mark.parametrize("name", ["os", "BertConfig", "BertForEverything"])
def test_name_that_is_no_model_of_transformers_is_refused(name, tmp_path):
    checkpoint = save(tiny("bert spans"), tmp_path / "torch")
    text = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(text.replace("BertForQuestionAnswering", name))
    with pytest.raises(ConversionError, match=f"architectures is \\['{name}'\\]"):
        load_torch_model(checkpoint)


def test_dropout_is_off_in_flax_and_in_the_reference(converted):
    _, checkpoint, flax, _ = converted("bert", hidden_dropout_prob=0.5)
    description = describe_config(read_config(flax))
    inputs = description.example_inputs(seed=0)
    module = converters.load(flax)
    ours = FlaxRunner(description, module).outputs(inputs)["last_hidden_state"]
    reference = load_torch_model(checkpoint)
    assert np.abs(ours - torch_outputs(reference, inputs)["last_hidden_state"]).max() < 1e-4
    assert np.abs(ours - torch_outputs(reference.train(), inputs)["last_hidden_state"]).max() > 0.1


def test_step_of_training_moves_the_statistics_as_torch_does(converted):
    model, _, flax, _ = converted("resnet basic")
    module = converters.load(flax)
    module.train()
    pixels = describe_config(read_config(flax)).example_inputs(seed=3)["pixel_values"]
    ours = nnx.jit(lambda module, pixels: module(pixels))(module, pixels)
    theirs = model.train()(torch.from_numpy(pixels)).last_hidden_state
    np.testing.assert_allclose(ours["last_hidden_state"], theirs.detach(), atol=2e-5)
    for mine, torchs in (
        (module.embedder.normalization, model.embedder.embedder.normalization),
        (module.stages[1].layers[0].shortcut.normalization, model.encoder.stages[1].layers[0].shortcut.normalization),
        (module.stages[2].layers[1].layer[1].normalization, model.encoder.stages[2].layers[1].layer[1].normalization),
    ):
        np.testing.assert_allclose(mine.mean[...], torchs.running_mean, atol=2e-6)
        np.testing.assert_allclose(mine.var[...], torchs.running_var, atol=2e-5)


def write(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: value.clone() for name, value in tensors.items()}, checkpoint / "model.safetensors")
