"""Configs of encoders are read as transformers reads them, and refused when the module cannot compute them."""

from dataclasses import fields

import pytest
import transformers

from pipeline.errors import ParameterError
from pipeline.models.description import ModelKind
from pipeline.models.encoder_families import ENCODERS
from pipeline.models.encoders.bert_config import BertConfig
from pipeline.models.encoders.clip_config import ClipConfig
from pipeline.models.encoders.resnet_config import ResnetConfig
from pipeline.models.encoders.t5_config import T5Config
from pipeline.models.encoders.vit_config import VitConfig
from pipeline.models.registry import describe_config

BASE_CLASS = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "vit": "ViTModel",
    "clip": "CLIPModel",
    "resnet": "ResNetModel",
    "convnext": "ConvNextModel",
}


def config_of(model_type, **given):
    return {"model_type": model_type, "architectures": [BASE_CLASS[model_type]], **given}


def same(ours, theirs):
    return ours in (theirs, tuple(theirs)) if isinstance(theirs, list | tuple) else ours in (theirs, (theirs, theirs))


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_absent_fields_have_the_defaults_of_transformers(model_type):
    ours = ENCODERS[model_type].config.from_dict(config_of(model_type))
    theirs = getattr(transformers, BASE_CLASS[model_type]).config_class()
    parts = [(ours, theirs)]
    if model_type == "clip":
        parts += [(ours.text, theirs.text_config), (ours.vision, theirs.vision_config)]
    shared = [
        (name, getattr(part, name), getattr(config, name))
        for part, config in parts
        for name in (field.name for field in fields(part))
        if getattr(config, name, None) is not None and isinstance(getattr(part, name), int | float | str | bool | tuple)
    ]
    assert len(shared) > (6 if model_type in ("resnet", "convnext") else 8)
    assert [entry for entry in shared if not same(entry[1], entry[2])] == []


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_unknown_head_is_refused_with_those_there_are(model_type):
    with pytest.raises(ParameterError, match=BASE_CLASS[model_type]) as caught:
        describe_config({"model_type": model_type, "architectures": ["SomethingElse"]})
    assert "SomethingElse" in str(caught.value)


def test_nearest_head_is_named():
    with pytest.raises(ParameterError, match="did you mean 'BertForMaskedLM'"):
        BertConfig.from_dict(config_of("bert") | {"architectures": ["BertForMaskedLm"]})


def test_config_without_architectures_is_refused():
    with pytest.raises(ParameterError, match="architectures is \\[\\]"):
        BertConfig.from_dict({"model_type": "bert"})


def test_all_complaints_come_at_once():
    with pytest.raises(ParameterError) as caught:
        BertConfig.from_dict(
            config_of("bert", hidden_size=50, num_attention_heads=8, hidden_act="gelux", is_decoder=True, vocab_size=0)
        )
    for found in ("no multiple", "did you mean 'gelu'", "is_decoder", "vocab_size is 0"):
        assert found in str(caught.value)


def test_values_of_another_kind_are_complaints():
    clip = config_of("clip", text_config={"eos_token_id": [2, 3], "layer_norm_eps": "small"})
    with pytest.raises(ParameterError, match=r"text_config\.layer_norm_eps is 'small'.*eos_token_id is \[2, 3\]"):
        ClipConfig.from_dict(clip)
    with pytest.raises(ParameterError, match=r"image_size is 22\.5"):
        VitConfig.from_dict(config_of("vit", image_size=22.5))
    with pytest.raises(ParameterError, match=r"depths is 2\.5"):
        ResnetConfig.from_dict(config_of("resnet", depths=2.5))
    for name, value in (("pad_token_id", float("inf")), ("layer_norm_eps", 10**400), ("architectures", 5)):
        with pytest.raises(ParameterError, match=f"{name} is "):
            BertConfig.from_dict(config_of("bert") | {name: value})
    with pytest.raises(ParameterError, match="patch_size is True"):
        VitConfig.from_dict(config_of("vit", patch_size=True))


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_quantized_weights_are_refused(model_type):
    with pytest.raises(ParameterError, match="quantization_config is set"):
        describe_config(config_of(model_type, quantization_config={"bits": 4}))


def test_clip_complaints_name_their_tower():
    with pytest.raises(ParameterError) as caught:
        ClipConfig.from_dict(
            config_of("clip", text_config={"hidden_act": "sine"}, vision_config={"num_attention_heads": 7})
        )
    assert "text_config.hidden_act" in str(caught.value)
    assert "vision_config.hidden_size" in str(caught.value)


def test_a_clip_tower_that_is_no_mapping_is_a_complaint():
    with pytest.raises(ParameterError, match=r"text_config is 'x', must be a mapping") as caught:
        ClipConfig.from_dict(config_of("clip", text_config="x", vision_config=[3]))
    assert "vision_config is [3], must be a mapping" in str(caught.value)


def test_old_clip_config_replaces_the_one_beside_it():
    config = config_of("clip", text_config={"hidden_size": 8, "num_attention_heads": 2}, text_config_dict={})
    assert ClipConfig.from_dict(config).text.hidden_size == 8
    config["text_config_dict"] = {"hidden_size": 24, "num_attention_heads": 2}
    assert ClipConfig.from_dict(config).text.hidden_size == 24


@pytest.mark.parametrize(
    ("given", "is_tied", "is_scaled"),
    [
        ({}, True, True),
        ({"tie_word_embeddings": False}, False, False),  # transformers 4: T5 v1.1, Flan
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),  # transformers 5
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, False, True),
    ],
)
def test_t5_head_and_scale_are_two_facts(given, is_tied, is_scaled):
    parsed = T5Config.from_dict(config_of("t5", **given))
    assert (parsed.is_tied, parsed.scale_decoder_outputs) == (is_tied, is_scaled)


@pytest.mark.parametrize(
    ("projection", "activation", "is_gated"),
    [("relu", "relu", False), ("gated-gelu", "gelu_new", True), ("gated-silu", "silu", True), ("gelu", "gelu", False)],
)
def test_t5_projection_is_read_as_transformers_reads_it(projection, activation, is_gated):
    parsed = T5Config.from_dict(config_of("t5", feed_forward_proj=projection))
    assert (parsed.activation, parsed.is_gated) == (activation, is_gated)
    theirs = transformers.T5Config(feed_forward_proj=projection)
    assert (theirs.dense_act_fn, theirs.is_gated_act) == (activation, is_gated)


def test_unknown_t5_projection_is_refused():
    with pytest.raises(ParameterError, match="feed_forward_proj is 'gated-sine'"):
        T5Config.from_dict(config_of("t5", feed_forward_proj="gated-sine"))


def test_labels_are_counted_by_their_names():
    config = config_of("vit") | {"architectures": ["ViTForImageClassification"]}
    assert VitConfig.from_dict(config).num_labels == 2
    assert VitConfig.from_dict(config | {"id2label": {"0": "a", "1": "b", "2": "c"}}).num_labels == 3


def test_resnet_stages_must_agree():
    with pytest.raises(ParameterError, match="2 stages and depths 1"):
        ResnetConfig.from_dict(config_of("resnet", hidden_sizes=[8, 16], depths=[1]))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (config_of("t5"), ModelKind.SEQ2SEQ_LM),
        (config_of("t5") | {"architectures": ["T5EncoderModel"]}, ModelKind.TEXT_ENCODER),
        (config_of("whisper"), ModelKind.SPEECH_TO_TEXT),
        (config_of("bert"), ModelKind.TEXT_ENCODER),
        (config_of("clip"), ModelKind.IMAGE_TEXT),
        (config_of("resnet"), ModelKind.IMAGE),
    ],
)
def test_kind_follows_from_the_config(config, kind):
    assert describe_config(config).kind is kind
