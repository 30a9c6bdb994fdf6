"""Blocks are paired by declared templates, and errors are relative to the largest value of the torch block."""

import math

import numpy as np
import pytest

from converters.parity_blocks import (
    as_torch_lays_out,
    compare_blocks,
    judge_precisely,
    pair_blocks,
    relative_errors,
)
from pipeline.errors import ConversionError

TEMPLATES = (("model.embed_tokens", "embed_tokens"), ("model.layers.{layer}", "layers.{layer}"))


def test_pairs_follow_the_order_in_which_blocks_ran():
    taps = ["embed_tokens", *(f"layers.{i}" for i in range(11)), "other"]
    pairs = pair_blocks(taps, blocks=TEMPLATES)
    assert list(pairs)[:3] == ["embed_tokens", "layers.0", "layers.1"]
    assert pairs["layers.10"] == "model.layers.10"
    assert "other" not in pairs


def test_a_declared_block_that_is_never_tapped_is_an_error():
    with pytest.raises(ConversionError, match=r"layers\.\{layer\}: the Flax model taps no such path"):
        pair_blocks(["embed_tokens"], blocks=TEMPLATES)


def test_a_path_of_two_templates_is_an_error():
    with pytest.raises(ConversionError, match=r"layers\.0: several templates take it"):
        pair_blocks(["layers.0"], blocks=(("a.{i}", "layers.{i}"), ("b.{j}", "layers.{j}")))


def test_every_block_that_cannot_be_compared_is_named():
    taps = {"layers.0": np.zeros((2, 3)), "layers.1": np.zeros((2, 3))}
    with pytest.raises(ConversionError) as caught:
        compare_blocks({"layers.0": "a", "layers.1": "b"}, taps=taps, activations={"b": np.zeros((3, 5))})
    assert "a: never ran in torch" in str(caught.value)
    assert "layers.1 is (2, 3), b in torch (3, 5)" in str(caught.value)


def test_errors_are_relative_to_the_largest_value():
    reference = np.array([[4.0, -2.0], [1.0, 1.0]], np.float32)
    candidate = reference + np.array([[0.0, 0.02], [0.0, 0.0]], np.float32)
    largest, mean = relative_errors(reference, candidate)
    assert largest == pytest.approx(0.005, rel=1e-4)
    assert mean == pytest.approx(0.0025, rel=1e-4)


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-9], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
    ],
)
def test_values_without_a_scale_never_pass_unseen(reference, candidate, expected):
    assert relative_errors(np.array(reference), np.array(candidate))[0] == expected


def test_images_are_compared_in_torchs_layout():
    torch_image = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    flax_image = np.moveaxis(torch_image, 1, -1)
    assert np.array_equal(as_torch_lays_out(flax_image, shape=torch_image.shape), torch_image)
    assert as_torch_lays_out(np.zeros((2, 4, 5, 3)), shape=(2, 3, 5, 4)) is None
    assert as_torch_lays_out(np.zeros((2, 3)), shape=(3, 2)) is None


def test_float64_says_which_of_two_float32_sides_is_off():
    exact = {"a": np.array([[1.0, 2.0, 4.0]])}
    torch_off = {"a": np.array([[1.0, 2.0, 4.0 + 4e-5]], np.float32)}
    flax_right = {"layers.0": np.array([[1.0, 2.0, 4.0]], np.float32)}
    blocks = compare_blocks({"layers.0": "a"}, taps=flax_right, activations=torch_off)
    (judged,) = judge_precisely(blocks, taps=flax_right, activations=torch_off, precise=exact)
    assert blocks[0].max_relative == pytest.approx(1e-5, rel=0.02)
    assert judged.max_relative == 0.0
    assert judged.torch_rounding == pytest.approx(1e-5, rel=0.02)
    (blamed,) = judge_precisely(
        blocks,
        taps={"layers.0": torch_off["a"]},
        activations={"a": flax_right["layers.0"]},
        precise=exact,
    )
    assert blamed.max_relative == pytest.approx(1e-5, rel=0.02)
    assert blamed.torch_rounding == 0.0
