"""Sampling rules give the scores of transformers' own processors."""

import jax
import numpy as np
import pytest
import torch
from test_sampling import rows_of
from test_token_choice import SIZE, VOCABULARY, arguments, jitted_adjust, rules_of
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.serving.engine.sampling import above_min_p, cut

# One float32 operation each; XLA and torch round them alike but for the last bit.
SCORE_TOLERANCE = 1e-6


def processed(logits, ids, *processors):
    scores = torch.from_numpy(logits.copy())
    for processor in processors:
        scores = processor(torch.tensor(ids), scores)
    return scores.numpy()


def test_the_repetition_penalty_is_transformers():
    logits = (np.random.default_rng(0).normal(size=(SIZE, VOCABULARY)) * 6).astype(np.float32)
    prompts, completions = [[3, 9, 9, 40], [100, 0, 5, 6]], [[9, 77], [0, 0]]
    rules = [rules_of(p, c, repetition_penalty=1.3) for p, c in zip(prompts, completions, strict=True)]
    found = jitted_adjust(logits, arguments(rules))
    ids = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    expected = processed(logits[:2], ids, RepetitionPenaltyLogitsProcessor(1.3))
    np.testing.assert_allclose(found[:2], expected, rtol=SCORE_TOLERANCE)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    logits = (np.random.default_rng(1).normal(size=(4, VOCABULARY)) * 3).astype(np.float32)
    found = np.asarray(above_min_p(logits, min_p_B=rows_of(4, min_p=min_p).min_p_B))
    expected = processed(logits, [[0]] * 4, MinPLogitsWarper(min_p))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("temperature", "k", "p"), [(0.7, 12, 0.9), (1.8, 100, 0.3), (0.2, 3, 0.999)])
def test_temperature_top_k_and_top_p_keep_what_transformers_keeps(temperature, k, p):
    logits = (np.random.default_rng(2).normal(size=(4, VOCABULARY)) * 3).astype(np.float32)
    rows = rows_of(4, top_k=k, top_p=p)
    found = jax.jit(lambda x: cut(x / temperature, k_B=rows.top_k_B, p_B=rows.top_p_B))(logits)
    warpers = TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(p)
    expected = processed(logits, [[0]] * 4, *warpers)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    kept = np.isfinite(expected)
    np.testing.assert_allclose(np.asarray(found)[kept], expected[kept], rtol=SCORE_TOLERANCE)
