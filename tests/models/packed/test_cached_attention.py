"""Attention over the cache where it lies, against float64 and against the attention that copies it first."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.models.decoders.attention import View, attend_over_copy
from pipeline.models.decoders.config import Layer
from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.rotary import rotation
from pipeline.models.decoders.rotary_scaling import Rotary
from pipeline.models.packed.attention import attend_in_place, read_cache_in_place
from pipeline.models.registry import describe_config

POSITIONS = 96
TOLERANCE = 2e-6
HEADS = ((9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 1, 128), (5, 5, 48))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(shape).normal(size=shape) * scale).astype(np.float32)


def layer_of(window: int | None, *, rotary: Rotary | None = None) -> Layer:
    layer = describe_config(CONFIG).parsed.layers[0]
    return dataclasses.replace(layer, window=window, scale=0.3, rotary=rotary)


def view_of(positions: list[int], slots: list[int] | None, *, turns: Mapping[Rotary, Any] | None = None) -> View:
    return View(
        turns=turns or {},
        positions_BT=jnp.asarray(positions, jnp.int32)[:, None],
        slots_B=None if slots is None else jnp.asarray(slots, jnp.int32),
        attention_length=POSITIONS,
    )


def attended(q, keys, values, *, positions, slots, window, by=attend_in_place):
    """Over a cache that holds the rows' own keys and values already, which are written again."""
    view = view_of(positions, slots)
    rows = np.asarray(slots if slots else range(len(positions)))
    own = [part[rows, :, np.minimum(positions, POSITIONS - 1)][:, None] for part in (keys, values)]
    more = {"layer": layer_of(window), "view": view, "softcap": None, "in_float32": False}
    function = jax.jit(lambda *given: by(*given, **more), donate_argnums=(3, 4))
    mixed, *cache = function(q, *own, jnp.array(keys), jnp.array(values))
    for found, before in zip(cache, (keys, values), strict=True):
        np.testing.assert_array_equal(found, before)
    return np.asarray(mixed)


def exact(q, keys, values, *, positions, slots, window):
    num_rows, _, num_heads, head_dim = q.shape
    made = np.zeros((num_rows, 1, num_heads * head_dim))
    for row, position in enumerate(positions):
        if position >= POSITIONS:
            continue
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(num_heads):
            at = slots[row] if slots else row, head * keys.shape[1] // num_heads, slice(first, position + 1)
            scores = keys[at].astype(np.float64) @ q[row, 0, head] * 0.3
            weights = np.exp(scores - scores.max())
            made[row, 0, head * head_dim : (head + 1) * head_dim] = weights / weights.sum() @ values[at]
    return made


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_row_attends_over_what_its_sequence_has(target: str, heads: tuple[int, ...], window: int | None) -> None:
    num_heads, num_groups, head_dim = heads
    positions = [0, 14, 15, 16, 50, POSITIONS - 1, POSITIONS, 3]
    slots = [7, 2, 0, 1, 3, 4, 5, 2]
    keys, values = drawn(8, num_groups, POSITIONS, head_dim), drawn(8, num_groups, POSITIONS, head_dim, scale=3)
    q = drawn(8, 1, num_heads, head_dim, scale=2)
    for chosen in (slots, None):
        given = {"positions": positions, "slots": chosen, "window": window}
        found, right = attended(q, keys, values, **given), exact(q, keys, values, **given)
        assert np.abs(found - right).max() / np.abs(right).max() < TOLERANCE
        real = [row for row, position in enumerate(positions) if position < POSITIONS]
        copied = attended(q, keys, values, **given, by=attend_over_copy)
        assert np.abs(found - copied)[real].max() / np.abs(right).max() < TOLERANCE
        assert not found[6].any()


@pytest.mark.parametrize("num_turning", [0, 8, 32, 64])
def test_new_keys_and_values_enter_the_cache_rotated_before_any_row_looks(target: str, num_turning: int) -> None:
    positions, slots = [40, 41, 42, 7, POSITIONS, 43], [2, 2, 2, 0, 1, 2]  # four rows of one sequence, one is padding
    frequencies = 1.0 / 10_000 ** (np.arange(num_turning // 2) / 64)
    turn = rotation(jnp.asarray(positions)[:, None], frequencies_F=frequencies.astype(np.float32))
    rotary = describe_config(CONFIG).parsed.layers[0].rotary if num_turning else None
    given = {
        "layer": layer_of(None, rotary=rotary),
        "view": view_of(positions, slots, turns={rotary: turn} if rotary else {}),
        "softcap": None,
        "in_float32": False,
    }
    new = drawn(6, 1, 9, 64, scale=2), drawn(6, 1, 3, 64), drawn(6, 1, 3, 64, scale=3)
    before = drawn(4, 3, POSITIONS, 64), drawn(4, 3, POSITIONS, 64, scale=2)
    found, right = (
        jax.jit(lambda *rest, by=by: by(*rest, **given), donate_argnums=(3, 4))(*new, *map(jnp.array, before))
        for by in (attend_in_place, attend_over_copy)
    )
    real = [row for row, position in enumerate(positions) if position < POSITIONS]
    for one, other in zip([found[0][real, :], *found[1:]], [right[0][real, :], *right[1:]], strict=True):
        assert np.abs(one - other).max() / np.abs(other).max() < TOLERANCE
    assert not np.asarray(found[0])[4].any()
    differs = [(np.asarray(part) != old).any(axis=(1, 3)) for part, old in zip(found[1:], before, strict=True)]
    changed = [np.argwhere(where).tolist() for where in differs]
    assert changed == [[[0, 7], [2, 40], [2, 41], [2, 42], [2, 43]]] * 2


def test_a_row_gets_the_same_bits_alone_and_among_others(target: str) -> None:
    keys, values, q = drawn(8, 3, POSITIONS, 64), drawn(8, 3, POSITIONS, 64), drawn(8, 1, 9, 64)
    positions = [90, 5, 40, 95, 17, 60, 33, 71]
    together = attended(q, keys, values, positions=positions, slots=None, window=None)
    for row, position in enumerate(positions):
        alone = attended(q[row : row + 1], keys, values, positions=[position], slots=[row], window=None)
        np.testing.assert_array_equal(alone[0], together[row])


def test_what_no_sequence_has_is_not_read(target: str) -> None:
    keys, values, q = drawn(2, 2, POSITIONS, 16), drawn(2, 2, POSITIONS, 16), drawn(1, 1, 4, 16)
    given = {"positions": [11], "slots": [1], "window": 6}
    right = attended(q, keys, values, **given)
    for part in (keys, values):
        part[0], part[:, :, 12:], part[:, :, :6] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(attended(q, keys, values, **given), right)


@pytest.mark.parametrize("score", [0.0, 300.0, -300.0])
def test_scores_of_any_size_give_weights(target: str, score: float) -> None:
    keys, values = np.full((1, 1, POSITIONS, 16), score / 4, np.float32), drawn(1, 1, POSITIONS, 16)
    q = np.full((1, 1, 1, 16), 1.0, np.float32)
    found = attended(q, keys, values, positions=[40], slots=None, window=None)
    np.testing.assert_allclose(found[0, 0], values[0, 0, :41].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "is_in_place"),
    [({}, True), ({"head_dim": 24}, False), ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, False)],
    ids=["plain", "uneven heads", "softcap"],
)
def test_layers_that_the_call_cannot_compute_keep_xlas_attention(change: dict, is_in_place: bool) -> None:
    config = describe_config({**CONFIG, **change}).parsed
    model = read_cache_in_place(Decoder(config, rngs=nnx.Rngs(0)))
    chosen = {block.attention.over_cache for block in model.layers}
    assert chosen == {attend_in_place if is_in_place else attend_over_copy}
