"""The formulas, against numbers worked by hand."""

import math

import numpy as np
import pytest

from pipeline.evaluation.metrics import (
    HISTOGRAM_EDGES,
    LossTotals,
    compare_logits,
    kl_divergence,
    log_softmax,
    matched_prefix,
    token_losses,
    topk_overlap,
)


def logits(*values):
    return np.array([[values]], dtype=np.float32)


def test_differences_of_one_position():
    found = compare_logits(logits(1.0, -4.0, 2.0), logits(1.5, -4.0, 1.0))
    assert found.max_abs_BT.tolist() == [[1.0]]
    assert found.max_rel_BT.tolist() == [[0.25]]  # over the largest logit, 4
    assert found.same_top1_BT.tolist() == [[False]]
    assert found.histogram.sum() == 3


def test_kl_of_two_coins():
    """p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2)."""
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl_divergence(logits(math.log(3), 0.0), logits(0.0, 0.0))[0, 0] == pytest.approx(expected, rel=1e-6)


def test_kl_is_not_symmetric_and_zero_for_shifted_logits():
    p, q = logits(math.log(3), 0.0), logits(0.0, 0.0)
    assert kl_divergence(p, q)[0, 0] != pytest.approx(kl_divergence(q, p)[0, 0], rel=1e-3)
    assert kl_divergence(p, p + 5.0)[0, 0] == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(p, p)[0, 0] == 0.0


def test_large_logits_do_not_overflow():
    assert np.exp(log_softmax(logits(1e4, 0.0))).tolist() == [[[1.0, 0.0]]]
    assert np.isfinite(kl_divergence(logits(1e4, 0.0), logits(0.0, 1e4))).all()


def test_equal_models_agree_in_everything():
    values = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    found = compare_logits(values, values)
    assert found.max_abs_BT.max() == found.max_rel_BT.max() == found.kl_BT.max() == 0.0
    assert found.same_top1_BT.all()
    assert found.histogram[0] == values.size


def test_zero_reference_has_no_division_by_zero():
    assert compare_logits(logits(0.0, 0.0), logits(0.0, 0.0)).max_rel_BT.tolist() == [[0.0]]


def test_histogram_holds_every_difference():
    found = compare_logits(logits(0.0, 0.0, 1.0), logits(2e-9, 0.5, 1e9))
    assert found.histogram.sum() == 3
    assert found.histogram[-1] == 1
    assert len(found.histogram) == len(HISTOGRAM_EDGES) - 1


def test_not_finite_logits_are_named():
    with pytest.raises(
        ValueError, match="2 logits of the candidate are not finite, the first at row 0, position 0, token 1"
    ):
        compare_logits(logits(0.0, 0.0, 0.0), logits(0.0, np.nan, np.inf))
    with pytest.raises(ValueError, match="of the reference"):
        compare_logits(logits(np.inf), logits(0.0))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_logits(logits(0.0), logits(0.0, 1.0))


def test_the_largest_of_both_sides_are_counted_whatever_their_order():
    reference = np.array([[9.0, 8.0, 7.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    candidate = np.array([[7.0, 8.0, 9.0, 0.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert topk_overlap(reference, candidate, k=3) == pytest.approx([1.0, 1 / 3])
    assert topk_overlap(reference, candidate, k=5).tolist() == [1.0, 1.0]


def test_nothing_counts_after_the_first_difference():
    left, right = np.array([[1, 2, 3, 4], [1, 2, 3, 4]]), np.array([[1, 9, 3, 4], [1, 2, 3, 4]])
    assert matched_prefix(left, right).tolist() == [1, 4]


def test_loss_of_even_odds_is_the_log_of_the_vocabulary():
    losses = token_losses(np.zeros((2, 3, 7), np.float32), np.zeros((2, 3), np.int32))
    assert losses == pytest.approx(np.full((2, 3), math.log(7)))


def test_loss_is_a_mean_over_tokens_not_over_batches():
    totals = LossTotals()
    totals.add(np.full((3, 4), 1.0))
    totals.add(np.full((1, 4), 5.0))
    assert totals.num_tokens == 16
    assert totals.loss == 2.0
    assert totals.perplexity == pytest.approx(math.exp(2.0))


def test_hopeless_model_has_a_finite_perplexity():
    totals = LossTotals()
    totals.add(np.array([1e4]))
    assert math.isfinite(totals.perplexity)
    assert math.isnan(LossTotals().loss)
