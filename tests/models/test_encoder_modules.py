"""What the encoder modules promise beside agreeing with torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.t5.modeling_t5 import T5Attention

from pipeline.models.checkpoint import abstract_leaves, build_model
from pipeline.models.encoders.t5 import position_buckets
from pipeline.models.registry import describe_config

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 40,
}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": 101,
    "num_mel_bins": 7,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 4,
    "max_source_positions": 5,
    "decoder_start_token_id": 4,
}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 101, "d_model": 20}
T5 |= {"num_layers": 1, "num_heads": 2, "d_kv": 6, "d_ff": 28}
VIT = {"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": 24, "num_attention_heads": 2}
VIT |= {"num_hidden_layers": 1, "image_size": 12, "patch_size": 4, "intermediate_size": 20}
RESNET = {"model_type": "resnet", "architectures": ["ResNetModel"], "embedding_size": 6}
RESNET |= {"hidden_sizes": [8, 12], "depths": [1, 1]}


def made(config):
    description = describe_config(config)
    return description, build_model(description, drawn(abstract_leaves(description)), dtype=None, source="test")


def drawn(leaves):
    """Drawn by numpy: the initializers of Flax take seconds to compile."""
    rng = np.random.default_rng(5)
    found = {path: rng.standard_normal(leaf.shape, dtype=np.float32) * 0.2 for path, leaf in leaves.items()}
    return {path: np.abs(value) + 0.5 if path.endswith((".var", ".scale")) else value for path, value in found.items()}


def run(description, module, inputs):
    return nnx.jit(description.forward)(module, inputs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (10, 17), (64, 500), (16, 20)])
def test_position_buckets_are_transformers(num_buckets, max_distance, is_causal):
    num_tokens = 700
    places = torch.arange(num_tokens)
    theirs = T5Attention._relative_position_bucket(
        places[None, :] - places[:, None],
        bidirectional=not is_causal,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    ours = position_buckets(num_tokens, num_buckets=num_buckets, max_distance=max_distance, is_causal=is_causal)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_padding_changes_no_other_token():
    description, module = made(BERT)
    inputs = description.example_inputs(seed=1)
    short = inputs["attention_mask"].sum(axis=1)[2]
    padded = run(description, module, inputs)["last_hidden_state"]
    alone = run(description, module, {name: value[2:, :short] for name, value in inputs.items()})["last_hidden_state"]
    np.testing.assert_allclose(padded[2, :short], alone[0], atol=2e-6)


def test_text_of_nothing_but_padding_gives_finite_numbers():
    description, module = made(BERT)
    inputs = description.example_inputs(seed=1)
    inputs["attention_mask"][1] = 0
    outputs = run(description, module, inputs)
    assert all(np.isfinite(value).all() for value in outputs.values())


def test_token_types_are_zero_unless_given():
    description, module = made(BERT)
    inputs = description.example_inputs(seed=1)
    without = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    zeros = {**without, "token_type_ids": np.zeros_like(inputs["input_ids"])}
    first, second = (run(description, module, given)["last_hidden_state"] for given in (without, zeros))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("config", [BERT, T5, WHISPER, VIT, RESNET], ids=lambda config: config["model_type"])
def test_bfloat16_weights_compute_in_bfloat16(config):
    description = describe_config(config)
    graph, state = nnx.split(description.abstract())
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)
    inputs = description.example_inputs(seed=1)
    outputs = jax.eval_shape(lambda state, given: description.forward(nnx.merge(graph, state), given), narrow, inputs)
    assert {name: str(value.dtype) for name, value in outputs.items()} == dict.fromkeys(outputs, "bfloat16")


def test_examples_differ_by_seed_and_repeat_with_it():
    description, _ = made(BERT)
    first, again, other = (description.example_inputs(seed=seed) for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["input_ids"] != other["input_ids"]).any()


def test_sound_of_another_length_is_refused():
    description, module = made(WHISPER)
    inputs = description.example_inputs(seed=1)
    inputs["input_features"] = inputs["input_features"][..., :-1]
    with pytest.raises(ValueError, match="9 frames, must be 10"):
        description.forward(module, inputs)


def test_image_of_another_size_is_refused():
    description, module = made(VIT)
    with pytest.raises(ValueError, match="must be \\(12, 12\\)"):
        description.forward(module, {"pixel_values": np.zeros((1, 3, 12, 16), np.float32)})


def test_text_without_positions_is_refused():
    description, module = made(BERT)
    tokens = np.ones((1, 41), np.int32)
    with pytest.raises(ValueError, match="41 tokens, the model has positions for 40"):
        description.forward(module, {"input_ids": tokens})
    assert (
        describe_config({**BERT, "model_type": "roberta", "architectures": ["RobertaModel"]}).parsed.longest_text == 38
    )


def test_t5_with_a_decoder_asks_for_its_tokens():
    description, module = made(T5)
    inputs = dict(description.example_inputs(seed=1))
    del inputs["decoder_input_ids"]
    with pytest.raises(ValueError, match="decoder_input_ids is missing"):
        nnx.eval_shape(description.forward, module, inputs)


def test_description_evaluates_a_model_that_is_being_trained():
    description, module = made(RESNET)
    inputs = description.example_inputs(seed=1)
    before = run(description, module, inputs)["last_hidden_state"]
    module.train()
    during = run(description, module, inputs)["last_hidden_state"]
    np.testing.assert_array_equal(before, during)
    recorded = np.asarray(module.embedder.normalization.mean[...])
    nnx.jit(lambda module, pixels: module(pixels))(module, inputs["pixel_values"])
    assert (recorded != module.embedder.normalization.mean[...]).all()
