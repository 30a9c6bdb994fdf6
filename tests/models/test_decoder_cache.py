"""The pass with a cache gives what the pass without gives; padding and other slots are left alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.models.decoders.model import Decoder, empty_cache, fuse_projections
from pipeline.models.decoders.readers import read_decoder

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# float32 products of 48 numbers in another order; measured 2e-6 on logits of size 1.
CACHE_TOLERANCE = 2e-5


def model_of(config=CONFIG, seed=0, scale=0.2):
    parsed = read_decoder({**config, "initializer_range": scale})
    return nnx.jit(lambda: Decoder(parsed, rngs=nnx.Rngs(seed)))()


@nnx.jit
def forward(model, tokens):
    return model(tokens)


@functools.partial(nnx.jit, static_argnames="attention_length")
def extend(model, tokens, **rest):
    return model.extend(tokens, **rest)


def tokens_of(batch, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 97, (batch, length)), jnp.int32)


@pytest.mark.parametrize("fused", [False, True])
def test_cached_pass_in_chunks_equals_the_pass_without_cache(fused):
    model = model_of()
    tokens = tokens_of(3, 20)
    expected = forward(model, tokens)
    if fused:
        fuse_projections(model)
    cache = empty_cache(model.config, slots=3, positions=32, dtype=jnp.float32)
    start = 0
    for size in (6, 1, 6, 1, 6):
        positions = jnp.broadcast_to(jnp.arange(start, start + size), (3, size))
        logits, cache = extend(
            model, tokens[:, start : start + size], cache=cache, positions_BT=positions, attention_length=24
        )
        start += size
        np.testing.assert_allclose(logits, expected[:, start - 1], atol=CACHE_TOLERANCE)


def test_padding_tokens_leave_nothing_in_the_cache_and_other_slots_are_untouched():
    model = model_of()
    cache = empty_cache(model.config, slots=3, positions=16, dtype=jnp.float32)
    positions = jnp.asarray([[0, 1, 2, 16, 16]])
    tokens = tokens_of(1, 5)
    logits, cache = extend(
        model,
        tokens,
        cache=cache,
        positions_BT=positions,
        attention_length=16,
        slots_B=jnp.asarray([1]),
        take_B=jnp.asarray([2]),
    )
    np.testing.assert_allclose(logits, forward(model, tokens[:, :3])[:, -1], atol=CACHE_TOLERANCE)
    for keys, values in cache:
        for part in (keys, values):
            assert not np.any(part[0]) and not np.any(part[2])
            assert np.all(np.any(part[1, :, :3], axis=-1)) and not np.any(part[1, :, 3:])


def test_a_token_does_not_see_what_follows_it():
    model = model_of()
    tokens = tokens_of(1, 12)
    changed = tokens.at[0, 8:].set(5)
    np.testing.assert_array_equal(forward(model, tokens)[:, :8], forward(model, changed)[:, :8])


def test_logits_are_float32_with_bfloat16_parameters():
    config = dataclasses.replace(read_decoder(CONFIG), tie_word_embeddings=True)
    model = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))()
    logits = forward(model, tokens_of(1, 4))
    assert logits.dtype == jnp.float32
    assert not hasattr(model, "lm_head")
    assert jax.numpy.isfinite(logits).all()
