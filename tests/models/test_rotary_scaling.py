"""Rotary frequencies are those of transformers, for every scaling, below and beyond the lengths where they change."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.models.decoders.rotary_scaling import ROPE_TYPES, read_rotary

HEAD_DIM = 10
MAX_POSITIONS = 64
# Powers of float32 numbers in two libraries; seen 2e-7.
TOLERANCE = 1e-6

SETTINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6],
        "long_factor": [1.5, 2.0, 4.0, 5.0, 7.0],
        "original_max_position_embeddings": 16,
    },
}
VARIANTS = [
    *SETTINGS.items(),
    ("yarn", {"factor": 4.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 6.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}),
    ("yarn", {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}),
    ("yarn", {"factor": 4.0, "attention_factor": 1.7}),
    ("longrope", {**SETTINGS["longrope"], "factor": 9.0}),
    ("longrope", {**SETTINGS["longrope"], "attention_factor": 0.8}),
]


def read(kind, settings, **given):
    complaints = []
    rotary = read_rotary(
        {"rope_type": kind, "rope_theta": 700.0, **settings, **given},
        theta=1.0,
        dim=HEAD_DIM,
        max_positions=MAX_POSITIONS,
        complaints=complaints,
    )
    return rotary, complaints


def test_every_kind_has_settings():
    assert set(SETTINGS) == set(ROPE_TYPES)


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 200])
@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_frequencies_equal_transformers(kind, settings, length):
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": kind, "rope_theta": 700.0, **settings},
    )
    if kind == "default":
        expected, factor = 700.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    else:
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
        expected = found.numpy()
    rotary, complaints = read(kind, settings)
    assert complaints == []
    np.testing.assert_allclose(rotary.frequencies(length=length), expected, rtol=TOLERANCE)
    assert rotary.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(("kind", "longest"), [("default", 64), ("dynamic", 64), ("yarn", 64), ("longrope", 16)])
def test_frequencies_stay_as_they_are_up_to_the_longest_cache_and_no_longer(kind, longest):
    rotary, _ = read(kind, SETTINGS[kind])
    assert rotary.longest_cache == longest
    np.testing.assert_array_equal(rotary.frequencies(length=1), rotary.frequencies(length=longest))
    changes = kind in ("dynamic", "longrope")
    assert changes == bool(np.any(rotary.frequencies(length=1) != rotary.frequencies(length=longest + 1)))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("linera", {}, ["'linera' is not supported", "did you mean 'linear'"]),
        ("llama3", {"factor": 2.0}, ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
        ("longrope", {**SETTINGS["longrope"], "short_factor": [1.0]}, ["short_factor has 1 numbers, needs 5"]),
    ],
)
def test_settings_that_cannot_be_computed_are_named(kind, settings, words):
    _, complaints = read(kind, settings)
    for word in words:
        assert word in "; ".join(complaints)
