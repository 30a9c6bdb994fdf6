"""The language model inside a Gemma 3 that also sees images; the rest of the checkpoint comes back as it was."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from decoder_models import CASES, saved, tokens_of
from flax import nnx
from safetensors.numpy import load_file, save_file

from converters.conversion import convert
from converters.flax_source import FlaxSource
from pipeline.errors import ParameterError
from pipeline.models.checkpoint import load_model
from pipeline.models.decoders.readers import read_decoder

# As for every decoder family, see test_decoder_families.
LOGIT_LIMIT = 1e-5
VISION = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config={**CASES["gemma3"][1], "final_logit_softcapping": None},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=205,  # not among the text's tokens
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("layout", ["file", "memory"])
def test_text_is_computed_and_every_tensor_comes_back(layout, reference, tmp_path):
    checkpoint = saved(tmp_path / "torch", reference)
    if layout == "memory":
        state = {name: tensor.numpy() for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
        save_file(state, checkpoint / "model.safetensors")
    stored = load_file(checkpoint / "model.safetensors")
    manifest = convert(checkpoint, to=tmp_path / "flax", via="family")
    assert manifest.family == "gemma3_text"
    assert {tensor.name.split("language_model")[0] for tensor in manifest.carried} == {
        name for name in stored if "language_model" not in name
    }
    back = FlaxSource(tmp_path / "flax")
    assert back.headers.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(back.read(name), tensor)
    tokens = tokens_of()
    with torch.no_grad():
        expected = reference(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    logits = nnx.jit(lambda model, tokens: model(tokens))(
        load_model(tmp_path / "flax", dtype=None), jnp.asarray(tokens)
    )
    assert np.abs(logits - expected).max() < LOGIT_LIMIT * np.abs(expected).max()


def test_sizes_that_published_configs_leave_out_are_those_of_transformers():
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2, "sliding_window": 1024}
    theirs = transformers.Gemma3Config(text_config=inner).text_config
    config = read_decoder({"model_type": "gemma3", "text_config": {**inner, "model_type": "gemma3_text"}})
    assert config.vocab_size == theirs.vocab_size == 262208
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert config == read_decoder(json.loads(theirs.to_json_string(use_diff=False)))


def test_a_softcap_that_transformers_would_not_apply_is_refused():
    with pytest.raises(ParameterError, match="final_logit_softcapping"):
        read_decoder({"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}})


def test_ties_that_contradict_each_other_are_refused():
    with pytest.raises(ParameterError, match="contradicts the one outside"):
        read_decoder(
            {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}
        )
