"""The Llama table: facts read and cross-checked, ties in every variant, nothing assumed."""

import numpy as np
import pytest
import torch

from converters.conversion import convert
from converters.families.registry import table_for
from converters.manifest import ConversionManifest
from converters.roads import family_road
from converters.rules import match
from pipeline.errors import ConversionError, ParameterError
from pipeline.models.checkpoint import load_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 3e-5,
}
# float32 products in two orders of summation, logits of size 10: seen 2e-5 at most.
LOGIT_TOLERANCE = 2e-4


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_rules_reach_every_leaf_of_the_model_and_nothing_else(tie, bias):
    config = {**CONFIG, "tie_word_embeddings": tie, "attention_bias": bias, "mlp_bias": bias}
    table = table_for(config)
    targets = family_road(config, names=(), reason="").targets
    for path in targets:
        hits = [rule for rule in table.rules if match(rule.targets[0], path) is not None]
        assert len(hits) == 1, path
    for rule in table.rules:
        assert any(match(rule.targets[0], path) is not None for path in targets), rule
        assert rule.inverted().inverted() == rule


def test_facts_come_from_the_config():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    facts = table_for({**CONFIG, "rope_parameters": rope, "attention_bias": True}).facts
    assert facts["norm_eps"] == 3e-5
    assert facts["rope_type"] == "llama3"
    assert facts["rope_theta"] == 5e5
    assert facts["rope_layout"] == "half-split"
    assert facts["qkv_bias"] is True
    assert facts["output_bias"] is True
    assert facts["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_parameters": {"rope_type": "yam", "factor": 2.0}}, "rope scaling 'yam' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(change, complaint):
    with pytest.raises(ParameterError, match=complaint):
        table_for({**CONFIG, **change})


def test_other_computations_are_refused_together():
    with pytest.raises(ParameterError) as caught:
        table_for({**CONFIG, "quantization_config": {"bits": 4}, "sliding_window": 64})
    assert "quantization_config" in str(caught.value)
    assert "sliding_window" in str(caught.value)


def test_unknown_family_names_the_nearest():
    with pytest.raises(ConversionError, match=r"model_type 'lama' has no conversion rules; .*did you mean 'llama'"):
        table_for({**CONFIG, "model_type": "lama"})


def test_tied_head_absent_c7a(llama, checkpoint, tmp_path):
    model = llama()
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    manifest = convert(checkpoint(model, state=state), to=tmp_path / "flax")
    assert manifest.tied == {}
    assert not hasattr(load_model(tmp_path / "flax", dtype=None), "lm_head")


def test_tied_head_present_and_equal_c7b(llama, checkpoint, tmp_path):
    manifest = convert(checkpoint(llama()), to=tmp_path / "flax")
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert manifest.num_source_tensors == manifest.num_target_leaves + 1


def test_tied_head_present_and_different_c7b(llama, checkpoint, tmp_path):
    model = llama()
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach().clone()}
    state["lm_head.weight"][3, 4] += 1
    with pytest.raises(ConversionError, match=r"lm_head.weight: differs from model.embed_tokens.weight in 1 of 4848"):
        convert(checkpoint(model, state=state), to=tmp_path / "flax")
    assert not (tmp_path / "flax").exists()


def test_untied_head_absent_c7c(llama, checkpoint, tmp_path):
    model = llama(tie_word_embeddings=False)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ConversionError) as caught:
        convert(checkpoint(model, state=state), to=tmp_path / "flax")
    assert "lm_head.kernel: nothing fills it" in str(caught.value)
    assert "if this model shares its embedding with its head, set it to true" in str(caught.value)


def test_eps_comes_from_the_config_c13(llama, checkpoint, tmp_path):
    """Small activations: a default of 1e-6 instead of the config's 1e-2 would be seen at once."""
    model = llama(rms_norm_eps=1e-2)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.01)
    convert(checkpoint(model), to=tmp_path / "flax")
    tokens = np.arange(12, dtype=np.int32)[None]
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(load_model(tmp_path / "flax", dtype="float32")(tokens))
    assert np.abs(ours - theirs).max() < LOGIT_TOLERANCE
    model.config.rms_norm_eps = 1e-6
    convert(checkpoint(model, rms_norm_eps=1e-6), to=tmp_path / "wrong")
    wrong = np.asarray(load_model(tmp_path / "wrong", dtype="float32")(tokens))
    assert np.abs(wrong - theirs).max() > 100 * LOGIT_TOLERANCE


def test_biases_are_converted(llama, checkpoint, tmp_path):
    model = llama(attention_bias=True, mlp_bias=True)
    convert(checkpoint(model), to=tmp_path / "flax")
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(load_model(tmp_path / "flax", dtype="float32")(tokens))
    assert np.abs(ours - theirs).max() < LOGIT_TOLERANCE * np.abs(theirs).max()


def test_bias_the_config_does_not_announce_is_explained(llama, checkpoint, tmp_path):
    with pytest.raises(ConversionError) as caught:
        convert(checkpoint(llama(attention_bias=True), attention_bias=False), to=tmp_path / "flax")
    assert "model.layers.0.self_attn.q_proj.bias: no rule takes it" in str(caught.value)
    assert "config.json says attention_bias: false" in str(caught.value)


def test_rotary_frequencies_are_ignored_by_name(llama, checkpoint, tmp_path):
    model = llama()
    state = {**model.state_dict(), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    convert(checkpoint(model, state=state), to=tmp_path / "flax")
    assert ConversionManifest.read(tmp_path / "flax").ignored == ("model.layers.1.self_attn.rotary_emb.inv_freq",)
