"""Conversions with the right shapes and the wrong values, each with worked numbers."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from decoder_models import saved, tiny_decoder, tokens_of
from flax import nnx
from safetensors.numpy import load_file, save_file

from converters.conversion import convert
from converters.exporting import export
from converters.families.fused_projections import split_qkv
from converters.families.registry import table_for
from converters.list_operations import Each, Stack, Unstack
from converters.manifest import ConversionManifest
from converters.operations import Reshape, Transpose
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import load_model, read_parameters
from pipeline.models.decoders.config import Norm
from pipeline.models.decoders.layers import ACTIVATIONS, Embedding, LayerNorm, RmsNorm
from pipeline.models.decoders.rotary import rotate, rotation
from pipeline.models.decoders.rotary_scaling import Rotary

# Sums are kept in float32 where torch rounds them; seen 0.83 and 0.97 of torch's error.
BFLOAT16_EXCESS = 1.2
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def applied(operations, array):
    arrays = [array]
    for operation in operations:
        arrays = operation.apply(arrays)
    return arrays


def undone(operations, arrays):
    for operation in reversed(operations):
        arrays = operation.inverted().apply(arrays)
    return arrays


@pytest.mark.parametrize(
    ("order", "heads", "groups", "expected"),
    [
        ("groups", 2, 2, ([0, 3], [1, 4], [2, 5])),  # C1: [q0, k0, v0, q1, k1, v1]
        ("groups", 4, 2, ([0, 1, 4, 5], [2, 6], [3, 7])),  # C2: [q0, q1, k0, v0, q2, q3, k1, v1]
        ("blocks", 4, 2, ([0, 1, 2, 3], [4, 5], [6, 7])),  # C2: the same shape as [Q; K; V]
    ],
)
def test_fused_rows_are_taken_apart_in_the_order_of_the_file_c1_c2(order, heads, groups, expected):
    operations = split_qkv(order, num_heads=heads, num_groups=groups, head_dim=1, leading=())
    rows = np.arange(heads + 2 * groups, dtype=np.float32)
    parts = applied(operations, rows)
    assert tuple(part.tolist() for part in parts) == expected
    np.testing.assert_array_equal(undone(operations, parts)[0], rows)
    shapes = [rows.shape]
    for operation in operations:
        shapes = operation.shapes(shapes)
    assert shapes == [part.shape for part in parts]


def test_every_family_names_the_order_of_its_fused_rows_c2():
    sizes = {"vocab_size": 11, "hidden_size": 80, "intermediate_size": 8, "num_hidden_layers": 1}
    neox = table_for({"model_type": "gpt_neox", **sizes, "num_attention_heads": 8})
    phi = table_for({"model_type": "phi3", **sizes, "num_attention_heads": 8, "num_key_value_heads": 2})
    assert neox.facts["qkv_layout"] == "fused: q, k, v of one head, then of the next"
    assert phi.facts["qkv_layout"] == "fused: all q, all k, all v"


def test_heads_are_turned_in_halves_c3():
    """head_dim 4, base 10000: 1.3818 is right for weights in half-split order, 0.5403 what turning pairs gives."""
    frequencies = Rotary(dim=4, max_positions=8).frequencies(length=8)
    q_BTNH, k_BTNH = (jnp.asarray(head, jnp.float32)[None, None, None] for head in ([1, 0, 0, 0], [1, 0, 1, 0]))
    turned = [
        rotate(x, **dict(zip(("cos", "sin"), rotation(jnp.asarray([[at]]), frequencies_F=frequencies), strict=True)))
        for x, at in ((q_BTNH, 1), (k_BTNH, 0))
    ]
    assert round(float(jnp.sum(turned[0] * turned[1])), 4) == 1.3818


def test_a_gain_of_one_is_stored_as_zero_or_as_one_c5():
    x = jnp.asarray([[3.0, -4.0]])
    normal = np.asarray(x) / math.sqrt(12.5)
    for offset, stored in ((1.0, 0.0), (0.0, 1.0)):
        norm = RmsNorm(2, config=Norm(eps=0.0, offset=offset, scales_in_float32=True), dtype=jnp.float32)
        norm.scale[...] = jnp.full(2, stored)
        np.testing.assert_allclose(norm(x), normal, rtol=1e-6)
    norm.config = Norm(eps=0.0, offset=1.0, scales_in_float32=True)
    np.testing.assert_allclose(norm(x), 2 * normal, rtol=1e-6)  # what shifting a shifted file again would give


def test_the_manifest_says_how_gains_are_stored_c5(tmp_path):
    checkpoint = saved(tmp_path / "torch", tiny_decoder("gemma2"))
    assert convert(checkpoint, to=tmp_path / "plain", via="family").facts["norm_offset"] == 1.0
    shifted = {
        name: tensor + 1 if "norm" in name else tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    save_file(shifted, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "layernorm_zero_centered_gamma": False}))
    assert convert(checkpoint, to=tmp_path / "shifted", via="family").facts["norm_offset"] == 0.0
    tokens = jnp.asarray(tokens_of(length=7))
    logits = [jax.jit(load_model(tmp_path / name, dtype=None))(tokens) for name in ("plain", "shifted")]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)  # adding one rounds, logits reach 4; seen 1e-5


def test_the_scale_of_an_embedding_is_rounded_and_never_folded_c6():
    """sqrt(3072) is 55.4256 in float32 and 55.5 in bfloat16."""
    for dtype, expected in ((jnp.float32, 55.42562484741211), (jnp.bfloat16, 55.5)):
        made = Embedding(1, 1, scale=3072**0.5, initial=1.0, rngs=nnx.Rngs(0), dtype=dtype)
        made.embedding[...] = jnp.ones((1, 1), dtype)
        assert float(made(jnp.zeros((1, 1), jnp.int32))[0, 0, 0]) == expected


def test_folding_a_scale_into_bfloat16_would_not_come_back_c6():
    """Times 1 / sqrt(128) and back changes 22 of the 128 mantissas; 1.4296875 becomes 1.421875."""
    mantissas = np.arange(128, 256).astype(np.float32) / 128
    scale = np.float32(1 / math.sqrt(128))
    folded = (mantissas * scale).astype(BFLOAT16)
    back = (folded.astype(np.float32) / scale).astype(BFLOAT16).astype(np.float32)
    assert int(np.sum(back != mantissas)) == 22
    assert float(back[mantissas == 1.4296875][0]) == 1.421875


@pytest.mark.parametrize("case", ["gemma2", "gpt-neox", "qwen3-moe"])
def test_bfloat16_tensors_come_back_bit_for_bit_c6(case, tmp_path):
    checkpoint = saved(tmp_path / "torch", tiny_decoder(case).to(torch.bfloat16))
    convert(checkpoint, to=tmp_path / "flax", via="family")
    export(tmp_path / "flax", to=tmp_path / "back")
    back, stored = (load_file(directory / "model.safetensors") for directory in (tmp_path / "back", checkpoint))
    assert {str(leaf.dtype) for leaf in back.values()} == {"bfloat16"}
    assert all(np.array_equal(back[name].view(np.uint16), stored[name].view(np.uint16)) for name in stored)


@pytest.mark.parametrize("case", ["gemma2", "olmo2"])
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(case, tmp_path):
    reference = tiny_decoder(case).to(torch.bfloat16)
    convert(saved(tmp_path / "torch", reference), to=tmp_path / "flax", via="family")
    rows = torch.from_numpy(tokens_of()).long()
    with torch.no_grad():
        theirs = reference(input_ids=rows).logits.float().numpy()
        exact = reference.float()(input_ids=rows).logits.numpy()
    ours = jax.jit(load_model(tmp_path / "flax", dtype=None))(jnp.asarray(tokens_of()))
    assert np.std(ours - exact) < BFLOAT16_EXCESS * np.std(theirs - exact)


@pytest.mark.parametrize(
    ("case", "head", "embedding"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("gemma3", "lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_tied_head_may_be_stored_and_must_then_be_equal_c7(case, head, embedding, tmp_path):
    checkpoint = saved(tmp_path / "torch", tiny_decoder(case))
    path = checkpoint / "model.safetensors"
    stored = load_file(path)
    assert head not in stored
    save_file({**stored, head: stored[embedding]}, path)
    assert convert(checkpoint, to=tmp_path / "equal", via="family").tied == {head: embedding}
    other = stored[embedding].copy()
    other[3, 4] += 1
    save_file({**stored, head: other}, path)
    with pytest.raises(ConversionError, match=rf"{head}: differs from {embedding} in 1 of"):
        convert(checkpoint, to=tmp_path / "different", via="family")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(stored, path)
    with pytest.raises(ConversionError, match="if this model shares its embedding with its head, set it to true"):
        convert(checkpoint, to=tmp_path / "absent", via="family")


def test_square_kernels_of_gpt_2_are_not_transposed_c8(tmp_path):
    checkpoint = saved(tmp_path / "torch", tiny_decoder("gpt2"))
    convert(checkpoint, to=tmp_path / "flax", via="family")
    stored, leaves = load_file(checkpoint / "model.safetensors"), read_parameters(tmp_path / "flax" / "params")
    square = stored["transformer.h.1.attn.c_proj.weight"]
    assert square.shape[0] == square.shape[1]
    np.testing.assert_array_equal(leaves["layers.1.attention.o_proj.kernel"], square)


def test_masks_that_old_files_keep_are_ignored_by_name(tmp_path):
    checkpoint = saved(tmp_path / "torch", tiny_decoder("gpt2"))
    path = checkpoint / "model.safetensors"
    mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
    save_file({**load_file(path), "transformer.h.0.attn.bias": mask}, path)
    convert(checkpoint, to=tmp_path / "flax", via="family")
    assert ConversionManifest.read(tmp_path / "flax").ignored == ("transformer.h.0.attn.bias",)


def test_eps_and_the_form_of_gelu_come_from_the_config_c13():
    """x = [0.001, -0.001]: 0.3015 with torch's eps of 1e-5, 0.7071 with Flax's default of 1e-6."""
    x = jnp.asarray([0.001, -0.001])
    for eps, expected in ((1e-5, 0.3015), (1e-6, 0.7071)):
        norm = LayerNorm(2, config=Norm(kind="layer", eps=eps), dtype=jnp.float32)
        np.testing.assert_allclose(norm(x), [expected, -expected], atol=5e-5)
    forms = [float(ACTIVATIONS[name](jnp.float32(2.0))) for name in ("gelu", "gelu_tanh")]
    assert [round(value, 5) for value in forms] == [1.9545, 1.9546]
    for name, theirs in (("gelu", "none"), ("gelu_tanh", "tanh")):
        expected = torch.nn.functional.gelu(torch.linspace(-4, 4, 33), approximate=theirs).numpy()
        np.testing.assert_allclose(ACTIVATIONS[name](jnp.linspace(-4, 4, 33)), expected, atol=1e-6)


def test_lists_of_tensors_are_stacked_and_changed_one_by_one():
    parts = [np.full((2, 3), number, np.float32) for number in range(4)]
    (stacked,) = Stack(4).apply(parts)
    assert stacked.shape == (4, 2, 3)
    assert Stack(4).inverted() == Unstack(4)
    assert all(np.array_equal(a, b) for a, b in zip(Unstack(4).apply([stacked]), parts, strict=True))
    each = Each((Transpose((1, 0)), Reshape((2, 3), (6,))))
    assert [made.shape for made in each.apply(parts[:2])] == [(3, 2), (6,)]
    assert each.shapes([(2, 3), (2, 3)]) == [(3, 2), (6,)]
    assert str(Each((Transpose((1, 0)),) * 3)) == "Each(3 x Transpose(axes=(1, 0)))"
    assert str(each) == "Each(Transpose(axes=(1, 0)), Reshape(before=(2, 3), after=(6,)))"
    back = each.inverted().apply(each.apply(parts[:2]))
    assert all(np.array_equal(a, b) for a, b in zip(back, parts[:2], strict=True))


@pytest.mark.parametrize(
    ("operation", "shapes", "complaint"),
    [
        (Stack(3), [(2,)] * 2, "stacks 3 tensors, got 2"),
        (Stack(2), [(2,), (3,)], "of one shape"),
        (Unstack(3), [(2, 3)], "first axis is 3"),
        (Each((Transpose((0,)),)), [(2,), (2,)], "takes 1 tensors, got 2"),
    ],
)
def test_lists_that_do_not_fit_are_named(operation, shapes, complaint):
    with pytest.raises(ValueError, match=complaint):
        operation.shapes(shapes)
