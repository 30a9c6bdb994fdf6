"""On-device sampling against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.serving.engine.sampling import SamplingRows, cut, most_likely, sample

# 4,000 draws: three standard deviations of a share are at most 0.024.
SHARE_TOLERANCE = 0.03
jitted_cut = jax.jit(lambda scores, k, p: cut(scores, k_B=k, p_B=p))
jitted_sample = jax.jit(lambda logits, rows, at: sample(logits, rows=rows, positions_B=at))


def rows_of(size, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    return SamplingRows(
        temperature_B=np.full(size, temperature, np.float32),
        top_k_B=np.full(size, top_k, np.int32),
        top_p_B=np.full(size, top_p, np.float32),
        min_p_B=np.full(size, min_p, np.float32),
        seed_B=np.broadcast_to(np.asarray(seed, np.uint32), (size,)),
    )


def kept_by_sorting(scores, k, p):
    kept = np.ones(len(scores), bool)
    if k:
        kept = scores >= np.sort(scores)[-min(k, len(scores))]
    if p < 1:
        masked = np.where(kept, scores, -np.inf)
        mass = np.exp(masked - masked.max())
        mass /= mass.sum()
        order = np.argsort(-masked)
        enough = np.searchsorted(np.cumsum(mass[order]), p) + 1
        kept = masked >= masked[order[enough - 1]]
    return kept


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.5), (0, 0.01), (12, 0.8), (500, 0.999)])
def test_the_cut_keeps_what_sorting_keeps(k, p):
    rng = np.random.default_rng(k)
    scores = (rng.normal(size=(4, 300)) * 3).astype(np.float32)
    found = np.isfinite(jitted_cut(scores, np.full(4, k, np.int32), np.full(4, p, np.float32)))
    for row in range(4):
        np.testing.assert_array_equal(found[row], kept_by_sorting(scores[row], k, p))


def test_ties_with_the_last_kept_token_are_kept():
    scores = jnp.asarray([[1.0, 2.0, 2.0, 2.0, -5.0]])
    found = jitted_cut(scores, jnp.asarray([2]), jnp.asarray([1.0]))
    np.testing.assert_array_equal(np.isfinite(found)[0], [False, True, True, True, False])


def test_draws_follow_the_softmax_at_the_temperature():
    logits = np.asarray([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)
    size = 4000
    tokens = np.asarray(
        jitted_sample(np.tile(logits, (size, 1)), rows_of(size, temperature=0.7, seed=np.arange(size)), np.arange(size))
    )
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / size, expected, atol=SHARE_TOLERANCE)


def test_consecutive_positions_of_one_seed_are_as_random_as_seeds():
    logits = np.zeros(4, np.float32)
    size = 4000
    tokens = np.asarray(jitted_sample(np.tile(logits, (size, 1)), rows_of(size, seed=42), np.arange(size)))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / size, 0.25, atol=SHARE_TOLERANCE)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16) / (size - 1)
    np.testing.assert_allclose(pairs, 1 / 16, atol=SHARE_TOLERANCE)


def test_a_cut_token_is_never_drawn_and_greedy_rows_stay_greedy_in_company():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(400, 50)).astype(np.float32)
    rows = rows_of(400, top_k=3, seed=np.arange(400))
    rows.temperature_B[::2] = 0.0
    tokens = np.asarray(jitted_sample(logits, rows, np.zeros(400, np.int32)))
    np.testing.assert_array_equal(tokens[::2], logits[::2].argmax(axis=1))
    ranks = (-logits).argsort(axis=1)[:, :3]
    assert all(token in best for token, best in zip(tokens, ranks, strict=True))
    assert (tokens[1::2] != logits[1::2].argmax(axis=1)).any()


def test_a_row_draws_the_same_token_alone_and_in_a_batch():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(8, 100)).astype(np.float32)
    rows = rows_of(8, temperature=1.3, top_p=0.95, seed=np.arange(8))
    together = np.asarray(jitted_sample(logits, rows, np.arange(8)))
    for row in range(8):
        alone = rows_of(1, temperature=1.3, top_p=0.95, seed=row)
        assert np.asarray(jitted_sample(logits[row : row + 1], alone, np.asarray([row])))[0] == together[row]


@pytest.mark.parametrize("num_tokens", [49_152, 320, 31, 1])
def test_the_most_likely_token_is_the_first_of_the_largest(num_tokens):
    scores = np.random.default_rng(num_tokens).integers(0, 4, (8, num_tokens)).astype(np.float32)
    scores[1], scores[2] = 0.0, -np.inf
    scores[3, -1] = scores[4, num_tokens // 3] = 9.0
    np.testing.assert_array_equal(most_likely(jnp.asarray(scores)), jnp.argmax(scores, axis=-1))
