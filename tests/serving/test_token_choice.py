"""Masks, bias, penalties and log-probabilities against numpy; `test_token_choice_transformers.py` asks transformers."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.serving.engine.request import Sampling
from pipeline.serving.engine.step_arguments import choice_arguments
from pipeline.serving.engine.token_choice import adjust, choose
from pipeline.serving.engine.token_rules import TokenRules

VOCABULARY = 101
ROOM = 64
SIZE = 4
"""Rows of every batch but one, so that little is compiled."""
# float32 against float64: four operations on numbers below 100.
LOGIT_TOLERANCE = 2e-5
jitted_adjust = jax.jit(adjust)
jitted_choose = jax.jit(functools.partial(choose, num_logprobs=5))


def arguments(rules, *, positions=None, size=None):
    positions = [7] * len(rules) if positions is None else positions
    size = SIZE if size is None else size
    return choice_arguments(
        rules,
        positions=positions,
        places=range(len(rules)),
        size=size,
        num_adjusted=ROOM,
        num_tokens=VOCABULARY,
    )


def sampling(**how):
    return Sampling(**{"max_tokens": 20, "temperature": 0.0, **how})


def rules_of(prompt, completion, **how):
    rules = TokenRules(sampling(**how), prompt=prompt)
    for token in completion:
        rules.advance([token])
    return rules


def by_hand(logits, prompt, completion, how):
    """vLLM's order: bias, repetition, frequency, presence."""
    logits = logits.astype(np.float64)
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *completion}:
        penalty = how.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(completion):
        logits[token] -= how.frequency_penalty * completion.count(token) + how.presence_penalty
    return logits


tokens = st.integers(0, VOCABULARY - 1)
texts = st.lists(tokens, max_size=20)
wishes = st.fixed_dictionaries(
    {
        "repetition_penalty": st.floats(0.1, 3.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=6),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(wishes, st.lists(tokens, max_size=20), st.lists(tokens, max_size=20)), min_size=3, max_size=3
    )
)
def test_bias_and_penalties_are_those_of_the_formulas(rows):
    logits = (np.random.default_rng(3).normal(size=(SIZE, VOCABULARY)) * 5).astype(np.float32)
    rules = [rules_of(prompt, completion, **how) for how, prompt, completion in rows]
    found = np.asarray(jitted_adjust(logits, arguments(rules)))
    for row, (_, prompt, completion) in enumerate(rows):
        expected = by_hand(logits[row], prompt, completion, rules[row].sampling)
        np.testing.assert_allclose(found[row], expected, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE)
        changed = {*prompt, *completion, *rules[row].sampling.logit_bias}
        untouched = [token for token in range(VOCABULARY) if token not in changed]
        np.testing.assert_array_equal(found[row][untouched], logits[row][untouched])


def test_a_row_without_wishes_gets_the_same_token_beside_one_with_all_of_them():
    logits = np.random.default_rng(4).normal(size=(SIZE, VOCABULARY)).astype(np.float32)
    plain = rules_of([1, 2], [3], temperature=1.0, top_k=20, seed=5)
    wishing = rules_of([1, 2], [3], presence_penalty=1.0, logit_bias={4: 50.0}, logprobs=2)
    assert plain.is_plain and not wishing.is_plain
    alone = np.asarray(jitted_choose(logits, arguments([plain])).token_B)
    together = np.asarray(jitted_choose(logits, arguments([plain, wishing])).token_B)
    assert together[0] == alone[0]
    assert together[1] == 4


class Only:
    """A grammar of one token."""

    def __init__(self, token):
        self._mask = np.zeros(-(-VOCABULARY // 32), np.uint32)
        self._mask[token // 32] = np.uint32(1 << token % 32)
        self.is_finished = False

    def start(self):
        return self

    def accept(self, tokens):
        self.is_finished = True

    def mask(self):
        return self._mask


@pytest.mark.parametrize("token", [0, 31, 32, 63, 100])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_only_what_the_mask_allows_is_chosen(token, temperature):
    logits = np.random.default_rng(token).normal(size=(SIZE, VOCABULARY)).astype(np.float32)
    logits[:, token] = -50.0
    masked = rules_of([1], [], grammar=Only(token), temperature=temperature, seed=3, repetition_penalty=1.5)
    free = rules_of([1], [], logprobs=0)
    found = jitted_choose(logits, arguments([masked, free]))
    assert np.asarray(found.token_B)[:2].tolist() == [token, int(logits[1].argmax())]
    masked.advance([token])
    assert masked.is_finished


def test_log_probabilities_are_those_of_the_model_whatever_else_is_asked():
    logits = (np.random.default_rng(5).normal(size=(SIZE, VOCABULARY)) * 4).astype(np.float32)
    rules = [
        rules_of([1], [2], logprobs=5),
        rules_of([1], [], logprobs=2, logit_bias={7: 100.0}),
        rules_of([1], [], logprobs=0, grammar=Only(9), temperature=1.5, top_k=3),
    ]
    found = jitted_choose(logits, arguments(rules))
    expected = jax.nn.log_softmax(logits, axis=-1)
    chosen = np.asarray(found.token_B)
    assert chosen[1:3].tolist() == [7, 9]
    np.testing.assert_allclose(found.logprob_B, expected[np.arange(SIZE), chosen], rtol=LOGIT_TOLERANCE)
    order = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(found.top_token_BN, order)
    np.testing.assert_allclose(found.top_logprob_BN, np.take_along_axis(expected, order, axis=1), rtol=LOGIT_TOLERANCE)


def test_padding_rows_change_nothing():
    logits = np.random.default_rng(6).normal(size=(SIZE, VOCABULARY)).astype(np.float32)
    rules = [rules_of([5, 6], [7], repetition_penalty=2.0, temperature=0.8, seed=1)]
    alone = np.asarray(jitted_choose(logits[:1], arguments(rules, size=1)).token_B)
    padded = np.asarray(jitted_choose(logits, arguments(rules)).token_B)
    assert padded[0] == alone[0]
    np.testing.assert_array_equal(padded[1:], logits[1:].argmax(axis=1))
