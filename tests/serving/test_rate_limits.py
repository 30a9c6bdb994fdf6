"""How much a client may ask in a minute; time is given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.http.rate_limits import FORGET_AFTER, RateLimited, RateLimits, Rates


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(clock, *, requests=None, tokens=None):
    return RateLimits(Rates(requests_per_minute=requests, tokens_per_minute=tokens), clock=clock)


def test_without_limits_everything_is_let_in_and_nothing_is_said(clock):
    limits = make(clock)
    assert all(limits.admit("a", num_tokens=10**9).headers == {} for _ in range(1000))


def test_requests_run_out_and_come_back_over_a_minute(clock):
    limits = make(clock, requests=3)
    left = [limits.admit("a", num_tokens=5).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    with pytest.raises(RateLimited) as raised:
        limits.admit("a", num_tokens=5)
    assert raised.value.retry_after_seconds == pytest.approx(20.0)
    assert raised.value.headers["x-ratelimit-limit-requests"] == "3"
    assert raised.value.headers["x-ratelimit-reset-requests"] == "60.000s"
    limits.admit("b", num_tokens=5)  # another client has its own
    clock.now += 19.9
    with pytest.raises(RateLimited):
        limits.admit("a", num_tokens=5)
    clock.now += 0.2
    limits.admit("a", num_tokens=5)


def test_unused_tokens_go_back_and_a_refused_request_takes_nothing(clock):
    limits = make(clock, requests=10, tokens=100)
    first = limits.admit("a", num_tokens=80)
    with pytest.raises(RateLimited, match="100 tokens a minute are allowed, 20 are left and 40 are needed"):
        limits.admit("a", num_tokens=40)
    first.settle(30)
    first.settle(0)  # only the first account of it counts
    again = limits.admit("a", num_tokens=70)
    assert again.headers["x-ratelimit-remaining-tokens"] == "0"
    assert again.headers["x-ratelimit-remaining-requests"] == "8"


def test_a_request_that_never_fits_is_not_told_to_wait(clock):
    with pytest.raises(RateLimited, match="may take 101 tokens, more than the 100 a minute") as raised:
        make(clock, tokens=100).admit("a", num_tokens=101)
    assert raised.value.retry_after_seconds is None


def test_clients_with_full_buckets_are_forgotten(clock):
    limits = make(clock, requests=1)
    for number in range(FORGET_AFTER):
        limits.admit(str(number), num_tokens=0)
    clock.now += 61
    limits.admit("0", num_tokens=0)
    limits.admit("new", num_tokens=0)
    with pytest.raises(RateLimited):
        limits.admit("0", num_tokens=0)
    assert len(limits._buckets) == 2


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 60)), max_size=60),
)
def test_no_minute_lets_in_more_than_twice_the_limit_and_waiting_as_told_suffices(limit, asks):
    """A bucket gives its content at once and refills meanwhile, so twice the limit bounds any minute."""
    clock = Clock()
    limits = make(clock, tokens=limit)
    taken = []
    for pause, amount in asks:
        clock.now += pause
        try:
            limits.admit("a", num_tokens=amount)
        except RateLimited as refusal:
            if refusal.retry_after_seconds is None:
                assert amount > limit
                continue
            clock.now += refusal.retry_after_seconds + 1e-6
            limits.admit("a", num_tokens=amount)
        taken.append((clock.now, amount))
    for start, _ in taken:
        assert sum(amount for at, amount in taken if start <= at < start + 60) <= 2 * limit + 1e-6
