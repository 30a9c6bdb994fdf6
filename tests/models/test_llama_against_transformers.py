"""The Flax Llama against the torch Llama of transformers with the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from pipeline.models.checkpoint import abstract_leaves, build_model
from pipeline.models.registry import describe_config

# float32, two layers, logits of size about 1: measured at most 4e-6.
LOGIT_TOLERANCE = 3e-5

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def leaf_path(name: str) -> tuple[str, bool]:
    """A torch parameter name to (leaf path, transposed); enough for a Llama, independent of the converter."""
    path = name.removeprefix("model.").replace("self_attn", "attention").replace("input_layernorm", "input_norm")
    path = path.replace("post_attention_layernorm", "post_attention_norm")
    if "norm" in path:
        return path.replace(".weight", ".scale"), False
    if "embed_tokens" in path:
        return path.replace(".weight", ".embedding"), False
    return path.replace(".weight", ".kernel"), path.endswith(".weight")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("tied", "biased"), [(True, False), (False, True)])
def test_logits_equal_those_of_transformers(rope, tied, biased):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_bias=biased,
        mlp_bias=biased,
        rope_parameters=dict(ROPES[rope]),
        rms_norm_eps=1e-5,
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    leaves = {}
    for name, tensor in reference.state_dict().items():
        path, transposed = leaf_path(name)
        if not (tied and path.startswith("lm_head")):
            leaves[path] = tensor.numpy().T if transposed else tensor.numpy()
    given = config.to_dict()
    assert leaves.keys() == abstract_leaves(describe_config(given)).keys()
    model = build_model(describe_config(given), leaves, dtype=None, source="test")
    tokens = np.random.default_rng(1).integers(0, 97, (2, 90))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(
        nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)),
        expected,
        atol=LOGIT_TOLERANCE * np.abs(expected).max(),
    )
