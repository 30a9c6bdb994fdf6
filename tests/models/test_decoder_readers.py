"""Configs are read as transformers reads them, in both spellings; what is not computed is refused, all at once."""

import pytest
import transformers

from pipeline.errors import ParameterError
from pipeline.models.checkpoint import abstract_leaves
from pipeline.models.decoders.family_defaults import DEFAULTS, RENAMES
from pipeline.models.decoders.readers import READERS, read_decoder
from pipeline.models.registry import FAMILIES, describe_config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 4, "n_head": 8, "n_positions": 64}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}


def config_of(family, **given):
    sizes = GPT2 if family == "gpt2" else SIZES
    if family == "gpt_neox":
        sizes = {**SIZES, "hidden_size": 128, "num_key_value_heads": None}
    if family == "qwen3_moe":
        sizes = {**SIZES, **EXPERTS, "mlp_only_layers": [1]}
    return {"model_type": family, **sizes, **given}


def test_every_reader_is_a_family_with_defaults():
    assert READERS.keys() == DEFAULTS.keys()
    assert READERS.keys() <= FAMILIES.keys()


@pytest.mark.parametrize("family", READERS)
def test_absent_keys_have_the_defaults_of_transformers(family):
    theirs = transformers.AutoConfig.for_model(family)
    for name, value in DEFAULTS[family].items():
        renamed = RENAMES.get(family, {}).get(name, name)
        if name == "rope_theta":
            rope = theirs.rope_parameters
            assert value == rope.get("full_attention", rope).get("rope_theta")
        elif name == "rope_local_base_freq":
            assert value == theirs.rope_parameters["sliding_attention"]["rope_theta"]
        elif name == "partial_rotary_factor":
            assert value == theirs.rope_parameters["partial_rotary_factor"]
        elif name == "sliding_window" and family.startswith("qwen"):
            assert theirs.sliding_window is None  # because use_sliding_window is off
        else:
            assert value == getattr(theirs, renamed), name


@pytest.mark.parametrize("family", READERS)
def test_a_config_that_transformers_writes_reads_as_one_that_was_written_by_hand(family):
    given = config_of(family)
    written = transformers.AutoConfig.for_model(**given).to_dict()
    assert read_decoder(written) == read_decoder(given)


@pytest.mark.parametrize("family", READERS)
def test_parameters_are_counted(family):
    for tied in (False, True):
        config = config_of(family, tie_word_embeddings=tied, attention_bias=tied, mlp_bias=tied)
        leaves = abstract_leaves(describe_config(config))
        assert read_decoder(config).num_parameters == sum(leaf.size for leaf in leaves.values())


def test_transformers_5_and_older_rope_settings_mean_the_same():
    old = read_decoder(config_of("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}))
    new = read_decoder(config_of("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}))
    assert old == new
    assert new.layers[0].rotary.theta == 5e5


def test_old_and_new_spellings_of_gemma_3_mean_the_same():
    old = config_of(
        "gemma3_text",
        rope_theta=2e5,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
        sliding_window=5,
    )
    new = config_of(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        sliding_window=5,
    )
    assert read_decoder(old) == read_decoder(new)
    assert [layer.window for layer in read_decoder(old).layers] == [5, 5, None, 5]
    assert [layer.rotary.theta for layer in read_decoder(old).layers] == [300.0, 300.0, 2e5, 300.0]


def test_old_and_new_spellings_of_gpt_neox_mean_the_same():
    old = config_of("gpt_neox", rotary_pct=0.5, rotary_emb_base=300)
    rope = {"rope_type": "default", "rope_theta": 300, "partial_rotary_factor": 0.5}
    assert read_decoder(old) == read_decoder(config_of("gpt_neox", rope_parameters=rope))
    assert read_decoder(old).layers[0].rotary.dim == 8


def test_old_names_of_the_long_scaling_of_phi_3_are_known():
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 2.1, 2.2]}
    kinds = [
        read_decoder(config_of("phi3", original_max_position_embeddings=16, rope_scaling={"type": kind, **factors}))
        for kind in ("su", "yarn", "longrope")
    ]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0].longest_context == 16


def test_windows_of_qwen_begin_where_the_config_says():
    given = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    assert [layer.window for layer in read_decoder(config_of("qwen2", **given)).layers] == [None, None, None, 5]
    off = {**given, "use_sliding_window": False}
    assert {layer.window for layer in read_decoder(config_of("qwen3", **off)).layers} == {None}


def test_layers_with_experts_are_those_of_transformers():
    given = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    layers = read_decoder(config_of("qwen3_moe", **given)).layers
    assert [layer.has_experts for layer in layers] == [False, True, False, False]


def test_gains_that_are_declared_to_be_stored_as_they_are_need_no_offset_c5():
    assert read_decoder(config_of("gemma2")).norm.offset == 1.0
    assert read_decoder(config_of("gemma2", layernorm_zero_centered_gamma=True)).norm.offset == 1.0
    assert read_decoder(config_of("gemma2", layernorm_zero_centered_gamma=False)).norm.offset == 0.0
    with pytest.raises(ParameterError, match="stores its gains as they are"):
        read_decoder(config_of("llama", layernorm_zero_centered_gamma=True))


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"hidden_act": "mish"}, ["mish", "silu"]),
        ("llama", {"rope_parameters": {"rope_type": "linera", "factor": 2.0}}, ["did you mean 'linear'"]),
        ("llama", {"num_key_value_heads": 3, "head_dim": 5}, ["multiple", "odd"]),
        ("llama", {"vocab_size": None, "hidden_size": None}, ["missing vocab_size, hidden_size"]),
        ("llama", {"hidden_size": 50}, ["hidden_size 50 is no multiple of num_attention_heads 8"]),
        ("llama", {"intermediate_size": 0, "sliding_window": 4}, ["intermediate_size is 0", "no attention windows"]),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, ["5.0 beside 6.0"]),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 6.0}},
            ["contradict"],
        ),
        ("mistral", {"layer_types": ["full_attention"] * 4}, ["this family has it alike"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window is 0"]),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, ["chunked_attention", "allowed: full_attention"]),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, ["3 entries for 4 layers"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, ["sliding_window is not set"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["looks ahead"]),
        ("gemma2", {"quantization_config": {"bits": 4}}, ["dequantize"]),
        ("gemma3_text", {"attn_logit_softcapping": 20.0}, ["transformers does not apply it"]),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["not one of this family"]),
        ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor"]),
        ("gpt2", {"add_cross_attention": True}, ["another sequence"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["more than the 8 experts"]),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, ["Qwen2ForSequenceClassification"]),
        ("gemma3", {"architectures": ["Gemma3Model"], "text_config": config_of("gemma3_text")}, ["Gemma3Model"]),
        ("llama", {"num_key_value_heads": -2}, ["num_key_value_heads is -2"]),
        ("llama", {"rope_theta": 1.0}, ["rope_theta is 1.0, must be above 1"]),
        ("llama", {"rope_theta": 0}, ["rope_theta is 0.0, must be above 1"]),
        ("gpt2", {"num_attention_heads": 4}, ["n_head is 8 beside num_attention_heads 4"]),
        ("llama", {"hidden_size": "wide"}, ["a value is not of the kind", "wide"]),
        ("llama", {"rope_parameters": "default"}, ["a value is not of the kind"]),
        ("llama", {"rms_norm_eps": None}, ["a value is not of the kind"]),
        ("gemma3", {"text_config": [1]}, ["text_config is [1]"]),
        ("lama", {}, ["'lama' is no decoder", "did you mean 'llama'"]),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_with_what_is_allowed(family, change, words):
    with pytest.raises(ParameterError) as caught:
        read_decoder(config_of(family, **change))
    for word in words:
        assert word in str(caught.value)
