"""Every decoder family computes what transformers computes, layer by layer, and gives every tensor back."""

import json
import shutil
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from decoder_models import CASES, LENGTH, NUM_LAYERS, saved, tiny_decoder, tokens_of
from safetensors.numpy import load_file, save_file

from converters.conversion import convert
from converters.exporting import export
from converters.families.registry import table_for
from converters.manifest import ConversionManifest
from converters.rules import render
from pipeline.errors import ConversionError, ParameterError
from pipeline.models.checkpoint import build_model, load_model, read_parameters
from pipeline.models.decoders.model import empty_cache, fuse_projections
from pipeline.models.decoders.readers import READERS
from pipeline.models.family import FamilyModel
from pipeline.models.registry import describe
from pipeline.models.variables import recording

# Relative to the largest activation of the block, float32; seen at most 3.8e-6.
BLOCK_LIMIT = 1e-5
CACHE_LIMIT = 2e-5
FAULT_AT_LEAST = 0.03
"""The smallest seen is 0.1 (whether Qwen3-MoE divides by the sum of its experts' probabilities)."""
GREEDY_TOKENS = 16
CHUNK = 5


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Reference, checkpoint and Flax directory of a case, made once."""

    @cache
    def make(case):
        root = tmp_path_factory.mktemp(case)
        reference = tiny_decoder(case)
        checkpoint = saved(root / "torch", reference)
        convert(checkpoint, to=root / "flax", via="family")
        return reference, checkpoint, root / "flax"

    return make


# Half the time of a compile; what is computed stays the same, and runs for milliseconds.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@jit
def forward_with_taps(model, tokens, mask):
    with recording() as taps:
        logits = model(tokens, attention_mask_BT=mask)
        return logits, dict(taps)


@partial(jit, static_argnames="attention_length")
def extend(model, tokens, **rest):
    return model.extend(tokens, **rest)


def torch_blocks(reference, paths, **inputs):
    seen, hooks = {}, []
    for path in paths:

        def keep(module, args, output, path=path):
            seen[path] = (output[0] if isinstance(output, tuple) else output).numpy()

        hooks.append(reference.get_submodule(path).register_forward_hook(keep))
    with torch.no_grad():
        logits = reference(**inputs).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, seen


def relative(ours, theirs):
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_every_block_computes_what_transformers_computes(case, converted):
    reference, _, flax = converted(case)
    tokens = tokens_of()
    mask = np.ones_like(tokens)
    mask[1, LENGTH - 6 :] = 0
    logits, taps = forward_with_taps(load_model(flax, dtype=None), jnp.asarray(tokens), jnp.asarray(mask))
    table = table_for(json.loads((flax / "config.json").read_text()))
    paths = {
        render(theirs, {"layer": str(layer)}): render(ours, {"layer": str(layer)})
        for theirs, ours in table.blocks
        for layer in range(NUM_LAYERS if "{layer}" in ours else 1)
    }
    assert sorted(paths.values()) == sorted(taps)
    expected, blocks = torch_blocks(
        reference, paths, input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask).long()
    )
    differences = {ours: relative(taps[ours], blocks[theirs]) for theirs, ours in paths.items()}
    differences["logits"] = relative(logits, expected)
    assert {path: value for path, value in differences.items() if value > BLOCK_LIMIT} == {}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back_bit_for_bit_and_transformers_takes_it(case, converted, tmp_path):
    reference, checkpoint, flax = converted(case)
    export(flax, to=tmp_path / "back")
    back, stored = (load_file(directory / "model.safetensors") for directory in (tmp_path / "back", checkpoint))
    assert back.keys() == stored.keys()
    for name, tensor in back.items():
        assert tensor.dtype == stored[name].dtype
        np.testing.assert_array_equal(tensor.view(np.uint32), stored[name].view(np.uint32), err_msg=name)
    returned = type(reference).from_pretrained(tmp_path / "back", attn_implementation="eager")
    rows = torch.from_numpy(tokens_of(length=9)).long()
    with torch.no_grad():
        assert torch.equal(returned(input_ids=rows).logits, reference(input_ids=rows).logits)


FAMILIES = tuple({kind: case for case, (kind, _) in reversed(CASES.items())}.values())
"""The first case of each family."""


def test_every_family_with_a_decoder_has_a_case():
    kinds = {tiny_decoder(case).config.model_type for case in FAMILIES}
    assert kinds == READERS.keys()


@pytest.mark.parametrize("case", [*FAMILIES, "llama-dynamic", "qwen2-windows", "phi3-longrope"])
def test_cached_steps_and_greedy_continuation_equal_transformers(case, converted):
    reference, _, flax = converted(case)
    model = fuse_projections(load_model(flax, dtype=None), materialize_head=True)  # as it is served
    positions = min(model.config.longest_context, LENGTH)
    num_prompt = max(positions - GREEDY_TOKENS, CHUNK + 1)
    rows = torch.from_numpy(tokens_of(length=num_prompt, seed=3)).long()
    cache = empty_cache(model.config, slots=2, positions=positions, dtype=jnp.float32)
    start = 0
    while rows.shape[1] < positions:
        with torch.no_grad():
            expected = reference(input_ids=rows).logits[:, -1]
        while start < rows.shape[1]:  # the prompt in chunks, then token by token, padded to one shape
            tokens = rows[:, start : start + CHUNK].numpy()
            at = np.arange(start, start + CHUNK)
            logits, cache = extend(
                model,
                jnp.asarray(np.pad(tokens, ((0, 0), (0, CHUNK - tokens.shape[1]))), jnp.int32),
                cache=cache,
                positions_BT=jnp.broadcast_to(np.where(at < start + tokens.shape[1], at, positions), (2, CHUNK)),
                take_B=jnp.full(2, tokens.shape[1] - 1),
                attention_length=positions,
            )
            start += tokens.shape[1]
        assert relative(logits, expected.numpy()) < CACHE_LIMIT, start
        np.testing.assert_array_equal(jnp.argmax(logits, axis=-1), expected.argmax(-1).numpy())
        rows = torch.cat([rows, expected.argmax(-1, keepdim=True)], dim=1)


@pytest.mark.parametrize("case", ["llama-dynamic", "phi3-longrope"])
def test_a_cache_whose_keys_would_turn_in_two_ways_is_refused(case, converted):
    config = load_model(converted(case)[2], dtype=None).config
    assert config.longest_context == 16
    with pytest.raises(ParameterError, match=r"17 positions, but this .* can be served with 16"):
        empty_cache(config, slots=1, positions=17, dtype=jnp.float32)


def _turned(config, **changes):
    return [replace(layer, rotary=replace(layer.rotary, **changes)) for layer in config.layers]


def _swapped(leaves, first, second):
    return {
        path: leaves[path.replace(first, second) if first in path else path.replace(second, first)] for path in leaves
    }


def _cut_in_three(leaves):
    """What a split into three equal pieces makes of GPT-NeoX's fused rows."""
    changed = dict(leaves)
    for path in leaves:
        if ".q_proj." in path:
            paths = [path.replace("q_proj", name) for name in ("q_proj", "k_proj", "v_proj")]
            by_head = [leaves[each].reshape(*leaves[each].shape[:-1], 8, -1) for each in paths]
            rows = np.stack(by_head, axis=-2).reshape(*leaves[path].shape[:-1], -1)
            changed |= dict(zip(paths, np.split(rows, 3, axis=-1), strict=True))
    return changed


def _norms_as_stored(config):
    return replace(config, norm=replace(config.norm, offset=0.0))


# What each family would be with one fact wrong: all of it has the right shapes.
FAULTS = {
    "llama": lambda config, leaves: (replace(config, layers=tuple(_turned(config, theta=400.0))), leaves),
    "mistral": lambda config, leaves: (
        replace(config, layers=tuple(replace(layer, window=None) for layer in config.layers)),
        leaves,
    ),
    "qwen2": lambda config, leaves: (
        config,
        {path: leaf * (0 if path.endswith("k_proj.bias") else 1) for path, leaf in leaves.items()},
    ),
    "qwen3": lambda config, leaves: (config, _swapped(leaves, "q_norm", "k_norm")),
    "gemma2": lambda config, leaves: (_norms_as_stored(config), leaves),
    "gemma3": lambda config, leaves: (
        replace(
            config,
            layers=tuple(
                replace(one, rotary=other.rotary)
                for one, other in zip(config.layers, reversed(config.layers), strict=True)
            ),
        ),
        leaves,
    ),
    "phi3": lambda config, leaves: (config, _swapped(leaves, "gate_proj", "up_proj")),
    "gpt2": lambda config, leaves: (
        config,
        {path: leaf.T if path.endswith("o_proj.kernel") else leaf for path, leaf in leaves.items()},
    ),
    "gpt-neox": lambda config, leaves: (config, _cut_in_three(leaves)),
    "mixtral": lambda config, leaves: (
        replace(config, experts=replace(config.experts, normalizes=False)),
        leaves,
    ),
    "qwen3-moe": lambda config, leaves: (
        replace(config, experts=replace(config.experts, normalizes=True)),
        leaves,
    ),
    "olmo2": lambda config, leaves: (config, _swapped(leaves, "post_attention_norm", "post_feedforward_norm")),
}


def test_every_family_has_a_fault():
    assert FAULTS.keys() == set(FAMILIES)


@pytest.mark.parametrize("case", FAULTS)
def test_a_wrong_fact_of_the_right_shape_is_seen(case, converted):
    reference, _, flax = converted(case)
    leaves = read_parameters(flax / "params")
    right = describe(flax)
    config, changed = FAULTS[case](right.parsed, leaves)
    wrong = FamilyModel(family=right.family, parsed=config)
    tokens = tokens_of()
    with torch.no_grad():
        expected = reference(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    model = build_model(wrong, changed, dtype=None, source="test")
    logits, _ = forward_with_taps(model, jnp.asarray(tokens), None)
    assert relative(logits, expected) > FAULT_AT_LEAST


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
def test_experts_that_are_stacked_as_in_memory_give_the_same_leaves_and_come_back_stacked(case, converted, tmp_path):
    reference, checkpoint, flax = converted(case)
    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    (tmp_path / "stacked").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "stacked")
    save_file(state, tmp_path / "stacked" / "model.safetensors")
    manifest = convert(tmp_path / "stacked", to=tmp_path / "flax", via="family")
    assert manifest.facts["expert_layout"] == "stacked, gate and up fused"
    assert ConversionManifest.read(flax).facts["expert_layout"] == "apart"
    apart, stacked = (read_parameters(directory / "params") for directory in (flax, tmp_path / "flax"))
    assert apart.keys() == stacked.keys()
    for path, leaf in apart.items():
        np.testing.assert_array_equal(leaf, stacked[path])
    export(tmp_path / "flax", to=tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, state[name])


def test_a_missing_expert_is_named(converted, tmp_path):
    _, checkpoint, _ = converted("mixtral")
    shutil.copy(checkpoint / "config.json", tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    stored = {key: tensor for key, tensor in load_file(checkpoint / "model.safetensors").items() if key != name}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path, to=tmp_path / "flax", via="family")
    assert "layers.1.mlp.experts.down_proj.kernel: nothing fills it" in str(caught.value)
    assert f"the checkpoint lacks {name} (rule " in str(caught.value)
    assert "experts.4.w2.weight (5 tensors) -> layers.{layer}.mlp.experts.down_proj.kernel" in str(caught.value)


@pytest.mark.parametrize("case", ["gpt2", "gemma2", "llama"])
def test_the_bare_model_saved_on_its_own_is_the_same_model(case, converted, tmp_path):
    reference, checkpoint, flax = converted(case)
    reference.base_model.save_pretrained(tmp_path / "bare")
    names = load_file(tmp_path / "bare" / "model.safetensors").keys()
    assert not any(name.startswith(("model.", "transformer.")) for name in names)
    shutil.copy(checkpoint / "config.json", tmp_path / "bare")
    convert(tmp_path / "bare", to=tmp_path / "flax", via="family")
    whole, bare = (read_parameters(directory / "params") for directory in (flax, tmp_path / "flax"))
    assert whole.keys() == bare.keys()
    assert all(np.array_equal(leaf, bare[path]) for path, leaf in whole.items())
