"""Every decoder family computes what transformers computes, layer by layer, and gives every tensor back."""

import json
import shutil
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from decoder_models import CASES, LENGTH, saved, tiny_decoder, tokens_of
from flax import nnx
from safetensors.numpy import load_file, save_file

from converters.conversion import convert, to_torch
from converters.families.registry import table_for
from converters.manifest import ConversionManifest
from converters.rules import render
from pipeline.models.checkpoint import load_model, read_parameters
from pipeline.models.decoders.model import empty_cache
from pipeline.models.variables import recording

# Relative to the largest activation of the block, float32; seen at most 3e-6.
BLOCK_LIMIT = 1e-5
CACHE_LIMIT = 2e-5
GREEDY_TOKENS = 16


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


@nnx.jit
def forward_with_taps(model, tokens, mask):
    with recording() as taps:
        logits = model(tokens, attention_mask_BT=mask)
        return logits, dict(taps)


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
        for layer in range(3 if "{layer}" in ours else 1)
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
    config = json.loads((flax / "config.json").read_text())
    manifest = ConversionManifest.read(flax)
    back = to_torch(read_parameters(flax / "params"), config, dtypes=manifest.source_dtypes)
    stored = load_file(checkpoint / "model.safetensors")
    assert back.keys() == stored.keys()
    for name, tensor in back.items():
        assert tensor.dtype == stored[name].dtype
        np.testing.assert_array_equal(tensor.view(np.uint32), stored[name].view(np.uint32), err_msg=name)
    save_file(back, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(checkpoint / "config.json", tmp_path)
    returned = type(reference).from_pretrained(tmp_path, attn_implementation="eager")
    rows = torch.from_numpy(tokens_of(length=9)).long()
    with torch.no_grad():
        assert torch.equal(returned(input_ids=rows).logits, reference(input_ids=rows).logits)


@pytest.mark.parametrize("case", CASES)
def test_cached_steps_and_greedy_continuation_equal_transformers(case, converted):
    reference, _, flax = converted(case)
    model = load_model(flax, dtype=None)
    positions = model.config.longest_context
    total = min(positions, 40)
    num_prompt = total - GREEDY_TOKENS if total > GREEDY_TOKENS else total // 2
    prompt = tokens_of(length=num_prompt, seed=3)
    rows = torch.from_numpy(prompt).long()
    expected_logits = []
    with torch.no_grad():
        for _ in range(total - num_prompt):
            logits = reference(input_ids=rows).logits[:, -1]
            expected_logits.append(logits.numpy())
            rows = torch.cat([rows, logits.argmax(-1, keepdim=True)], dim=1)
    step = nnx.jit(
        lambda model, tokens, cache, at: model.extend(tokens, cache=cache, positions_BT=at, attention_length=positions)
    )
    cache = empty_cache(model.config, slots=2, positions=positions, dtype=jnp.float32)
    at = jnp.broadcast_to(jnp.arange(num_prompt), prompt.shape)
    tokens = jnp.asarray(prompt)
    found = []
    for index, expected in enumerate(expected_logits):
        logits, cache = step(model, tokens, cache, at)
        assert relative(logits, expected) < CACHE_LIMIT, index
        tokens = jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)
        found.append(tokens)
        at = jnp.full((2, 1), num_prompt + index)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), rows[:, num_prompt:].numpy())
