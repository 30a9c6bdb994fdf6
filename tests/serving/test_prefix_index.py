"""Slots keep their tokens, prompts find them, and what is found is what is held."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.serving.engine.prefix_index import Prefix, PrefixIndex

GRANULARITY = 4


def tokens(*ids):
    return np.asarray(ids, np.int32)


def count(length, start=0):
    return np.arange(start, start + length, dtype=np.int32)


def test_the_longest_common_beginning_is_found_in_multiples_and_never_the_whole_prompt():
    index = PrefixIndex(2, granularity=GRANULARITY)
    slot = index.take(count(10)).slot
    index.release(slot, tokens=count(10))
    nowhere = Prefix(slot=-1, num_tokens=0)
    assert index.longest(count(30), beyond=nowhere) == Prefix(slot=slot, num_tokens=8)
    assert index.longest(count(8), beyond=nowhere).num_tokens == 4  # the last token must be computed for its logits
    assert index.longest(count(4), beyond=nowhere) is None
    assert index.longest(tokens(0, 1, 2, 3, 4, 9, 9, 9, 9), beyond=nowhere).num_tokens == 4
    assert index.longest(tokens(9, 1, 2, 3, 4, 5, 6, 7, 8), beyond=nowhere) is None


def test_the_next_turn_of_a_conversation_goes_on_in_its_slot():
    index = PrefixIndex(3, granularity=GRANULARITY)
    first, second = index.take(count(9)), index.take(count(9, start=50))
    index.release(second.slot, tokens=count(20, start=50))
    index.release(first.slot, tokens=count(18))
    assert index.take(count(30)) == Prefix(slot=first.slot, num_tokens=16)
    assert index.take(count(30, start=50)) == Prefix(slot=second.slot, num_tokens=20)


def test_a_prompt_that_shares_a_beginning_alone_leaves_the_slot_that_has_it_to_others():
    index = PrefixIndex(3, granularity=GRANULARITY)
    slot = index.take(count(8)).slot
    index.release(slot, tokens=count(40))
    prompt = np.concatenate([count(8), count(9, start=100)])
    taken = index.take(prompt)
    assert taken.slot != slot and taken.num_tokens == 0
    assert index.longest(prompt, beyond=taken) == Prefix(slot=slot, num_tokens=8)


def test_the_slot_that_was_freed_first_is_given_away_first_and_its_tokens_are_gone():
    index = PrefixIndex(2, granularity=GRANULARITY)
    old, new = index.take(count(8)).slot, index.take(count(8, start=50)).slot
    index.release(old, tokens=count(8))
    index.release(new, tokens=count(8, start=50))
    other = count(8, start=200)
    taken = index.take(other)
    assert taken.slot == old
    assert index.longest(count(20), beyond=Prefix(slot=-1, num_tokens=0)) is None
    assert index.longest(count(20, start=50), beyond=taken).slot == new


def test_the_only_free_slot_is_reused_in_place_although_tokens_are_lost():
    index = PrefixIndex(1, granularity=GRANULARITY)
    index.release(index.take(count(8)).slot, tokens=count(40))
    assert index.take(np.concatenate([count(8), count(9, start=100)])).num_tokens == 8


def test_a_busy_slot_is_found_as_far_as_it_is_computed():
    index = PrefixIndex(2, granularity=GRANULARITY)
    first = index.take(count(30))
    second = index.take(count(30))
    assert index.longest(count(30), beyond=second) is None
    index.hold(first.slot, count(12))
    assert index.longest(count(30), beyond=second) == Prefix(slot=first.slot, num_tokens=12)


def test_what_was_forgotten_is_not_found_and_not_even_the_rest_of_a_request_that_runs_on():
    index = PrefixIndex(2, granularity=GRANULARITY)
    free, busy = index.take(count(8)).slot, index.take(count(8)).slot
    index.release(free, tokens=count(8))
    index.forget()
    index.hold(busy, count(12))
    nowhere = Prefix(slot=-1, num_tokens=0)
    assert index.longest(count(20), beyond=nowhere) is None
    index.release(busy, tokens=count(16))
    assert index.longest(count(20), beyond=nowhere) is None
    again = index.take(count(20)).slot
    index.release(again, tokens=count(20))
    assert index.longest(count(20), beyond=nowhere).num_tokens == 16


def test_no_granularity_reuses_nothing_and_no_slot_is_an_error():
    index = PrefixIndex(1, granularity=0)
    slot = index.take(count(8)).slot
    with pytest.raises(KeyError, match="no slot is free"):
        index.take(count(8))
    index.release(slot, tokens=count(8))
    assert index.take(count(30)).num_tokens == 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "grow", "release", "forget"]), prompts), max_size=60))
def test_what_is_reused_is_always_what_the_slot_holds(events):
    """A plain model of the cache beside the index: a reused prefix must equal what was written last."""
    index = PrefixIndex(3, granularity=GRANULARITY)
    cache = [[] for _ in range(3)]  # what the slot really holds; None where it was computed with other parameters
    busy = {}
    for kind, prompt in events:
        if kind == "take" and index.free:
            array = np.asarray(prompt, np.int32)
            taken = index.take(array)
            assert taken.num_tokens % GRANULARITY == 0 and taken.num_tokens < len(prompt)
            assert cache[taken.slot][: taken.num_tokens] == prompt[: taken.num_tokens]
            found = index.longest(array, beyond=taken)
            if found is not None:
                assert found.num_tokens > taken.num_tokens and found.num_tokens % GRANULARITY == 0
                assert cache[found.slot][: found.num_tokens] == prompt[: found.num_tokens]
                cache[taken.slot] = cache[found.slot][: found.num_tokens]
            else:
                cache[taken.slot] = cache[taken.slot][: taken.num_tokens]
            busy[taken.slot] = prompt
        elif kind == "grow" and busy:
            slot = min(busy)
            at = len(cache[slot])
            cache[slot] += busy[slot][at : at + 5]
            if None not in cache[slot]:
                index.hold(slot, np.asarray(cache[slot], np.int32))
            else:
                index.hold(slot, np.asarray(busy[slot][: len(cache[slot])], np.int32))
        elif kind == "release" and busy:
            slot = max(busy)
            written = len(cache[slot])
            index.release(slot, tokens=np.asarray(busy.pop(slot)[:written], np.int32))
        elif kind == "forget":
            index.forget()
            cache = [[None] * len(held) for held in cache]
        assert sorted((*index.free, *busy)) == [0, 1, 2]
