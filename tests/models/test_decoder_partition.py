"""Which axis a leaf lies on, and which meshes a model allows, without a framework."""

import pytest

from pipeline.models.decoders.partition import (
    MeshSize,
    allowed_tensor_sizes,
    cache_axes,
    is_key_value,
    leaf_axes,
    why_not,
    widened,
)
from pipeline.models.decoders.readers import read_decoder

SIZES = {
    "vocab_size": 104,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
LLAMA = read_decoder({"model_type": "llama", **SIZES})
MIXTRAL = read_decoder({"model_type": "mixtral", **SIZES, "num_local_experts": 5})
OLMO = read_decoder({"model_type": "olmo2", **SIZES})


@pytest.mark.parametrize(
    ("path", "shape", "axes"),
    [
        ("layers.0.attention.q_proj.kernel", (40, 48), (None, "tensor")),
        ("layers.0.attention.q_proj.bias", (48,), ("tensor",)),
        ("layers.0.attention.qkv_proj.kernel", (40, 96), (None, "tensor")),
        ("layers.0.attention.o_proj.kernel", (48, 40), ("tensor",)),
        ("layers.0.attention.o_proj.bias", (40,), ()),
        ("layers.1.mlp.gate_up_proj.kernel", (40, 112), (None, "tensor")),
        ("layers.1.mlp.down_proj.kernel", (56, 40), ("tensor",)),
        ("layers.1.mlp.down_proj.bias", (40,), ()),
        ("layers.1.mlp.experts.up_proj.kernel", (5, 40, 56), (None, None, "tensor")),
        ("layers.1.mlp.experts.down_proj.kernel", (5, 56, 40), (None, "tensor")),
        ("layers.1.mlp.router.kernel", (40, 5), ()),
        ("layers.1.input_norm.scale", (40,), ()),
        ("layers.1.attention.q_norm.scale", (6,), ()),
        ("embed_tokens.embedding", (104, 40), ("tensor",)),
        ("embed_tokens.embedding", (101, 40), ()),
        ("embed_positions.embedding", (32, 40), ()),
        ("lm_head.kernel", (40, 104), (None, "tensor")),
        ("lm_head.kernel", (40, 101), ()),
    ],
)
def test_each_kind_of_leaf_lies_along_its_own_dimension(path, shape, axes):
    assert leaf_axes(path, shape, config=MIXTRAL, tensor=2) == axes
    assert leaf_axes(path, shape, config=MIXTRAL, tensor=1) == ()


def test_norms_over_all_heads_lie_with_their_heads():
    assert leaf_axes("layers.0.attention.k_norm.scale", (12,), config=OLMO, tensor=2) == ("tensor",)
    assert is_key_value("layers.0.attention.k_norm.scale", config=OLMO)
    assert not is_key_value("layers.0.attention.q_norm.scale", config=OLMO)
    assert not is_key_value("layers.0.attention.k_norm.scale", config=LLAMA)


def test_the_cache_lies_along_its_heads():
    assert cache_axes(tensor=4) == (None, "tensor")
    assert cache_axes(tensor=1) == ()


def test_a_model_with_fewer_key_value_heads_than_devices_gets_copies():
    assert widened(LLAMA, tensor=2) is LLAMA
    assert widened(LLAMA, tensor=8).num_key_value_heads == 8


def test_allowed_sizes_give_each_device_whole_heads_and_a_stretch_of_the_feed_forward_network():
    assert allowed_tensor_sizes(LLAMA) == (1, 2, 4, 8)
    odd = read_decoder({"model_type": "llama", **SIZES, "num_attention_heads": 6, "num_key_value_heads": 3})
    assert allowed_tensor_sizes(odd) == (1,)  # 2 divides the heads, and neither 3 groups nor their multiple


def test_a_mesh_that_fits_has_no_complaints():
    assert why_not(LLAMA, MeshSize(tensor=4, data=2), slots=6) == []


def test_all_that_is_wrong_with_a_mesh_is_said_at_once():
    complaints = why_not(MIXTRAL, MeshSize(tensor=3, data=5, hosts=2), slots=8)
    assert len(complaints) == 4
    assert "the 8 query heads, the experts' feed-forward size 56, the 2 key-value heads" in complaints[0]
    assert complaints[0].endswith("allowed: 1, 2, 4, 8")
    assert "use slots: 5" in complaints[1]
    assert "does not divide the 15 devices" in complaints[2]
    assert "use mesh.data: 1 and replicas: 5" in complaints[3]
