"""Shares of accelerators: what fits, what is refused with its arithmetic, what an allocator gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.ledger import (
    ALLOCATED_FRACTION,
    DEFAULT_RESERVE_BYTES,
    GRAINS,
    Claim,
    Reserve,
    grant_of,
    why_oversubscribed,
)
from pipeline.errors import ParameterError

GIB = 2**30
ROUNDING = 1 / GRAINS


def halves(*names):
    return [Claim(owner=name, share=0.5) for name in names]


def test_two_halves_share_a_device_and_a_third_is_refused_with_every_term():
    assert why_oversubscribed(halves("a", "b"), num_devices=1, source="this machine") is None
    reason = why_oversubscribed(halves("a", "b", "c"), num_devices=1, source="this machine")
    assert reason == ("GPUs are oversubscribed: 'a' 0.5 + 'b' 0.5 + 'c' 0.5: 1.5 together; this machine has 1 GPU")


def test_what_runs_already_is_named_apart():
    reason = why_oversubscribed(
        [Claim(owner="new", share=0.25, processes=2)], num_devices=1, source="the cluster", running=halves("a", "b")
    )
    assert reason == (
        "GPUs are oversubscribed: 'a' 0.5 + 'b' 0.5 run already; 'new' 0.25 x 2 asked for: 1.5 together; "
        "the cluster has 1 GPU"
    )


def test_parts_that_no_device_can_hold_are_refused_though_the_sum_fits():
    claims = [Claim(owner=name, share=0.6) for name in "abc"]
    assert "no arrangement" in why_oversubscribed(claims, num_devices=2, source="x")
    assert why_oversubscribed(claims, num_devices=3, source="x") is None


def test_an_arrangement_is_found_where_laying_the_largest_first_would_miss_it():
    shares = (0.4, 0.4, 0.3, 0.3, 0.3, 0.3)
    claims = [Claim(owner=str(index), share=share) for index, share in enumerate(shares)]
    assert why_oversubscribed(claims, num_devices=2, source="x") is None


def test_a_whole_device_is_not_shared_and_one_and_a_half_are_no_share():
    claims = [Claim(owner="whole", share=1), Claim(owner="part", share=0.1)]
    assert "1.1 together" in why_oversubscribed(claims, num_devices=1, source="x")
    assert why_oversubscribed(claims, num_devices=2, source="x") is None
    assert "whole devices" in why_oversubscribed([Claim(owner="odd", share=1.5)], num_devices=4, source="x")


def test_claims_on_nothing_fit_anywhere():
    assert why_oversubscribed([Claim(owner="cpu", share=0.0)], num_devices=0, source="x", running=halves("a")) is None


def test_ten_tenths_fill_a_device():
    assert why_oversubscribed([Claim(owner="a", share=0.1, processes=10)], num_devices=1, source="x") is None


@given(
    bins=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_whatever_lies_on_devices_is_accepted(bins):
    claims = []
    for parts in bins:
        scale = GRAINS / max(GRAINS, sum(parts))
        claims += [Claim(owner="x", share=int(part * scale) / GRAINS) for part in parts]
    assert why_oversubscribed(claims, num_devices=len(bins), source="x") is None


@given(
    claims=st.lists(
        st.builds(
            Claim,
            owner=st.just("x"),
            share=st.integers(1, GRAINS).map(lambda grains: grains / GRAINS),
            processes=st.integers(1, 3),
        ),
        max_size=6,
    ),
    num_devices=st.integers(0, 4),
)
def test_what_is_accepted_never_promises_more_than_there_is(claims, num_devices):
    if why_oversubscribed(claims, num_devices=num_devices, source="x") is None:
        assert sum(one.share * one.processes for one in claims) <= num_devices + len(claims) * ROUNDING
        assert max((one.share for one in claims), default=0) <= num_devices


@given(
    shares=st.lists(st.integers(2000, GRAINS).map(lambda grains: grains / GRAINS), min_size=1, max_size=5),
    total=st.integers(12, 200).map(lambda gib: gib * GIB),
    reserve=st.integers(0, 3 * GIB // 2),
)
def test_the_processes_of_a_device_fit_with_all_they_take(shares, total, reserve):
    """At most 95 % in allocators, and allocators and reserves together within the device."""
    if why_oversubscribed([Claim(owner="x", share=share) for share in shares], num_devices=1, source="x") is not None:
        return
    grants = [grant_of(share, total_bytes=total, reserve=Reserve(num_bytes=reserve, source="t")) for share in shares]
    fractions = [grant.fraction for grant in grants]
    assert sum(fractions) <= ALLOCATED_FRACTION + ROUNDING
    assert sum(fractions) * total + len(shares) * reserve <= total * (1 + len(shares) * ROUNDING)


def test_a_grant_is_the_share_less_the_reserve_with_the_arithmetic():
    grant = grant_of(0.25, total_bytes=80 * GIB, reserve=Reserve(num_bytes=2 * GIB, source="measured"))
    assert grant.fraction == pytest.approx(0.25 - 2 / 80, abs=ROUNDING)
    for term in ("0.25 x 80.00 GiB = 20.00 GiB", "less 2.00 GiB", "measured", "18.00 GiB"):
        assert term in grant.reason
    whole = grant_of(1, total_bytes=80 * GIB, reserve=Reserve())
    assert whole.fraction == ALLOCATED_FRACTION


def test_a_share_without_a_known_device_says_so():
    grant = grant_of(0.5, total_bytes=None, reserve=Reserve())
    assert grant.fraction == pytest.approx(ALLOCATED_FRACTION / 2)
    assert "unknown" in grant.reason


def test_a_share_smaller_than_the_reserve_is_refused_with_the_least_that_works():
    with pytest.raises(ParameterError) as caught:
        grant_of(0.05, total_bytes=16 * GIB, reserve=Reserve())
    for term in ("gpus: 0.05 leaves", "0.05 x 16.00 GiB = 0.80 GiB", "the default, not measured", "ask for at least"):
        assert term in str(caught.value)
    least = float(caught.value.hint.split("at least ")[1].split()[0])
    grant_of(least, total_bytes=16 * GIB, reserve=Reserve(num_bytes=DEFAULT_RESERVE_BYTES))
