"""Outputs are compared by name, and a prompt is continued without a cache."""

import numpy as np
import pytest

from converters.parity_outputs import compare_outputs, continue_by_forward, continued
from pipeline.errors import ConversionError


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_outputs_are_matched_by_name_and_the_rest_is_named():
    theirs = {"logits": random(2, 5, 31), "pooled": random(2, 8, seed=1), "only_torch": random(2, 2)}
    ours = {"pooled": theirs["pooled"] + 1e-3, "logits": theirs["logits"]}
    found, not_compared = compare_outputs(theirs, ours)
    assert [output.name for output in found] == ["pooled", "logits"]
    assert found[0].max_abs == pytest.approx(1e-3, rel=1e-3)
    assert found[0].max_kl is None
    assert (found[1].max_kl, found[1].top1_agreement, found[1].topk_overlap) == (0.0, 1.0, 1.0)
    assert not_compared == ("only_torch",)


def test_every_output_that_cannot_be_compared_is_named():
    with pytest.raises(ConversionError) as caught:
        compare_outputs({"logits": random(2, 5)}, {"logits": random(2, 6), "extra": random(1, 1)})
    assert "logits: Flax gives the shape (2, 6), torch (2, 5)" in str(caught.value)
    assert "extra: torch gives logits" in str(caught.value)


def test_class_logits_have_a_distribution_too():
    theirs = random(4, 7)
    ours = theirs.copy()
    ours[0] = ours[0][::-1]
    (found,), _ = compare_outputs({"logits": theirs}, {"logits": ours})
    assert found.max_kl > 0.1
    assert found.top1_agreement == 0.75


def test_outputs_that_are_not_finite_are_infinitely_far():
    theirs = random(2, 3, 7)
    (found,), _ = compare_outputs({"logits": theirs}, {"logits": np.full_like(theirs, np.nan)})
    assert found.max_relative == found.max_abs == float("inf")
    assert found.max_kl is None


def test_a_continuation_reads_what_it_wrote():
    """A model whose next token is the sum of the last two, modulo 13."""
    seen = []

    def forward(inputs):
        tokens = np.asarray(inputs["decoder_input_ids"])
        seen.append((tokens.shape, inputs["decoder_attention_mask"].shape, inputs["pixels"].shape))
        following = (tokens + np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]) % 13
        return {"logits": np.eye(13, dtype=np.float32)[following]}

    prompts = np.array([[1, 1, 9], [2, 3, 9]], np.int32)
    inputs = {
        "pixels": np.zeros((2, 4)),
        "decoder_input_ids": prompts,
        "decoder_attention_mask": np.ones_like(prompts),
    }
    made = continue_by_forward(forward, inputs=inputs, tokens="decoder_input_ids", prompt_tokens=2, num_tokens=5)
    assert made.tolist() == [[2, 3, 5, 8, 0], [5, 8, 0, 8, 8]]
    assert set(seen) == {((2, 7), (2, 7), (2, 4))}, "one shape, so that a compiled model compiles once"


def test_what_follows_a_first_difference_counts_as_not_matched():
    found = continued(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 9, 3], [4, 5, 6]]))
    assert [prompt.matched for prompt in found] == [1, 3]
