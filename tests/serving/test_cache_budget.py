"""Slots and context come out of the memory that there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.serving.accelerator.cache_budget import CONTEXT_GRAIN, SHORTEST_CONTEXT, Budget, Wish, fit_cache

GIB, MIB = 2**30, 2**20
PER_TOKEN = 2 * 30 * 3 * 64 * 2
"""SmolLM2-135M in bfloat16."""


def budget(limit=10 * GIB, weights=GIB, per_token=PER_TOKEN):
    return Budget(limit=limit, source="the allocator's limit", weights=weights, bytes_per_token=per_token)


def wish(slots=None, context=None, longest=8192, most=64, multiple=1):
    return Wish(slots=slots, context=context, longest_context=longest, most_slots=most, multiple=multiple)


def linear(per_slot):
    return lambda slots, context: slots * per_slot


def never(slots, context):
    raise AssertionError("nothing had to be compiled")


def test_with_room_to_spare_everything_open_is_the_most_and_nothing_is_compiled():
    fit = fit_cache(wish(most=8), budget=budget(limit=40 * GIB), temporaries=never)
    assert (fit.slots, fit.context, fit.temporaries) == (8, 8192, None)


def test_slots_are_what_the_weights_and_the_temporaries_leave():
    per_slot = 8192 * PER_TOKEN
    given = budget(limit=GIB + 20 * per_slot + 100 * MIB)
    fit = fit_cache(wish(), budget=given, temporaries=linear(10 * MIB))
    assert fit.context == 8192
    assert fit.slots * (per_slot + 10 * MIB) <= given.limit - given.weights
    assert fit.slots in (18, 19)
    for term in ("1.00 GiB of weights", f"{fit.slots} slots x 8192 tokens", "temporaries", "the allocator's limit"):
        assert term in fit.reason


def test_a_context_too_long_for_a_few_slots_is_shortened():
    given = budget(limit=GIB + 4 * 3000 * PER_TOKEN)
    fit = fit_cache(wish(), budget=given, temporaries=linear(0))
    assert (fit.slots, fit.context) == (4, 2816)
    asked = fit_cache(wish(slots=8), budget=given, temporaries=linear(0))
    assert (asked.slots, asked.context) == (8, 1280)


def test_what_is_asked_for_is_given_exactly_or_refused_with_every_term():
    fit = fit_cache(wish(slots=3, context=1000), budget=budget(), temporaries=linear(MIB))
    assert (fit.slots, fit.context) == (3, 1000)
    with pytest.raises(ParameterError) as caught:
        fit_cache(wish(slots=256, context=8192), budget=budget(), temporaries=never)
    for term in (
        "does not fit: 1.00 GiB of weights + 45.00 GiB of key-value cache (256 slots x 8192 tokens x 23040 bytes)",
        "= 46.00 GiB of 10.00 GiB (the allocator's limit)",
        "lower slots or max_context_tokens",
    ):
        assert term in str(caught.value)


def test_weights_that_leave_nothing_are_refused_at_the_least_there_could_be():
    with pytest.raises(ParameterError, match=r"at the least = .* of 1\.00 GiB"):
        fit_cache(wish(), budget=budget(limit=GIB), temporaries=linear(MIB))


def test_the_temporaries_alone_can_refuse():
    with pytest.raises(ParameterError, match=r"2\.00 GiB of temporaries"):
        fit_cache(wish(), budget=budget(limit=2 * GIB), temporaries=lambda slots, context: 2 * GIB)


def test_slots_of_several_copies_divide():
    per_slot = 8192 * PER_TOKEN
    fit = fit_cache(wish(multiple=4), budget=budget(limit=GIB + 11 * per_slot), temporaries=linear(0))
    assert fit.slots == 8


@given(
    limit=st.integers(0, 64 * GIB),
    weights=st.integers(0, 32 * GIB),
    per_token=st.integers(64, 2**19),
    slots=st.none() | st.integers(1, 256),
    context=st.none() | st.integers(16, 4096),
    longest=st.integers(4096, 131072),
    per_slot=st.integers(0, GIB),
    fixed=st.integers(0, GIB),
)
def test_what_is_chosen_always_fits_and_what_was_asked_is_kept(
    limit, weights, per_token, slots, context, longest, per_slot, fixed
):
    def temporaries(slots, context):
        return fixed + slots * per_slot

    given = budget(limit=limit, weights=weights, per_token=per_token)
    try:
        fit = fit_cache(wish(slots, context, longest), budget=given, temporaries=temporaries)
    except ParameterError:
        least = (slots or 1) * (context or SHORTEST_CONTEXT) * per_token
        assert weights + least + temporaries(slots or 1, context) > limit or (slots is None or context is None)
        return
    assert weights + fit.cache + (fit.temporaries or 0) <= limit
    assert fit.slots == slots or (slots is None and 1 <= fit.slots <= 64)
    assert fit.context == context or (context is None and SHORTEST_CONTEXT <= fit.context <= longest)
    assert fit.context in (context, longest) or fit.context % CONTEXT_GRAIN == 0
    assert fit.temporaries in (None, temporaries(fit.slots, fit.context))
