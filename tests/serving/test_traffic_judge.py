"""A challenger takes over with enough good evidence, and goes without."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.serving.traffic.traffic_conditions import (
    CANARY_METRICS,
    SHADOW_METRICS,
    ArmCount,
    CopyCount,
    Evidence,
    measured,
    merged,
    parse_conditions,
    percentile,
)
from pipeline.serving.traffic.traffic_judge import Rules, Verdict, judge

TIMES = st.lists(st.floats(0.1, 5000, allow_nan=False), max_size=30)


def rules_of(conditions=None, *, min_requests=50, window_seconds=300.0):
    conditions = {"error_rate": "< 1%", "p95_ttft_ms": "< 300"} if conditions is None else conditions
    return Rules(
        conditions=parse_conditions(conditions, known=SHADOW_METRICS),
        min_requests=min_requests,
        window_seconds=window_seconds,
    )


def evidence_of(*, answered=0, failed=0, ttft=10.0, champion=0, copies=None):
    return Evidence(
        champion=ArmCount(answered=champion, ttft_ms=[10.0] * champion, latency_ms=[20.0] * champion),
        challenger=ArmCount(
            answered=answered, failed=failed, ttft_ms=[ttft] * answered, latency_ms=[2 * ttft] * answered
        ),
        copies=copies,
    )


def test_conditions_are_read_as_they_are_written():
    gates = parse_conditions({"error_rate": "< 1%", "p95_ttft_ms": "<= 300"}, known=CANARY_METRICS)
    assert [(gate.metric, gate.comparison, gate.limit) for gate in gates] == [
        ("error_rate", "<", 0.01),
        ("p95_ttft_ms", "<=", 300.0),
    ]


def test_every_wrong_condition_is_named_at_once():
    with pytest.raises(ValueError) as raised:
        parse_conditions({"p95_tfft_ms": "< 1", "error_rate": "below 1%", "agreement": "> 0"}, known=CANARY_METRICS)
    text = str(raised.value)
    assert "p95_tfft_ms: no such metric, did you mean p95_ttft_ms?" in text
    assert "error_rate: 'below 1%' is not an operator" in text
    assert "agreement: no such metric" in text
    assert "p99_latency_ratio" in text


def test_a_good_challenger_is_promoted_after_enough_requests():
    early = judge(evidence_of(answered=49), rules=rules_of(), elapsed_seconds=1)
    assert early.verdict is Verdict.WAIT and early.reason == "49 of 50 requests"
    late = judge(evidence_of(answered=50), rules=rules_of(), elapsed_seconds=1)
    assert late.verdict is Verdict.PROMOTE
    assert "error_rate = 0 holds < 0.01" in late.reason and "p95_ttft_ms = 10 holds < 300" in late.reason


def test_a_slow_challenger_is_rolled_back_with_the_figure():
    found = judge(evidence_of(answered=50, ttft=301.0), rules=rules_of(), elapsed_seconds=1)
    assert found.verdict is Verdict.ROLLBACK
    assert found.reason == "after 50 requests: p95_ttft_ms = 301 FAILS < 300"


def test_a_failing_challenger_goes_before_it_has_failed_fifty_clients():
    found = judge(evidence_of(answered=3, failed=1), rules=rules_of(), elapsed_seconds=1)
    assert found.verdict is Verdict.ROLLBACK
    assert "1 of 4 requests failed; even if the rest of 50 succeed" in found.reason


def test_without_traffic_the_message_says_so():
    assert judge(evidence_of(), rules=rules_of(), elapsed_seconds=299).verdict is Verdict.WAIT
    found = judge(evidence_of(), rules=rules_of(), elapsed_seconds=300)
    assert found.verdict is Verdict.ROLLBACK and "no request came within 300 s" in found.reason
    found = judge(evidence_of(answered=7, champion=90), rules=rules_of(), elapsed_seconds=300)
    assert found.verdict is Verdict.ROLLBACK
    assert found.reason == "the challenger had 7 requests within 300 s (the champion 90); 50 are needed"


def test_what_was_not_measured_does_not_hold():
    rules = rules_of({"min_cosine": "> 0.99"}, min_requests=5)
    assert judge(evidence_of(answered=5), rules=rules, elapsed_seconds=1).verdict is Verdict.ROLLBACK
    copies = CopyCount(num_cosines=5, sum_cosines=4.99, min_cosine=0.995)
    assert judge(evidence_of(answered=5, copies=copies), rules=rules, elapsed_seconds=1).verdict is Verdict.PROMOTE


def test_the_clients_own_faults_are_judged_by_nothing():
    evidence = Evidence(challenger=ArmCount(refused=500))
    assert measured(evidence) == {}
    assert judge(evidence, rules=rules_of(), elapsed_seconds=1).verdict is Verdict.WAIT


def test_every_metric_that_can_be_named_can_be_measured():
    copies = CopyCount(
        equal=3, different=1, dropped=2, num_cosines=2, sum_cosines=1.9, min_cosine=0.9, max_abs_error=0.5
    )
    found = measured(evidence_of(answered=4, failed=1, champion=4, copies=copies))
    assert set(found) == set(SHADOW_METRICS) > set(CANARY_METRICS)
    assert found["agreement"] == 0.75 and found["mean_cosine"] == 0.95 and found["dropped_rate"] == pytest.approx(2 / 7)
    assert found["p95_ttft_ratio"] == 1.0 and found["error_rate"] == 0.2


@settings(deadline=None, max_examples=60)
@given(
    answered=st.integers(0, 200),
    failed=st.integers(0, 50),
    ttft=st.floats(0.1, 1000),
    elapsed=st.floats(0, 1000),
    min_requests=st.integers(1, 100),
    limit=st.floats(0, 100),
)
def test_verdicts_follow_from_the_evidence(answered, failed, ttft, elapsed, min_requests, limit):
    rules = rules_of({"error_rate": f"<= {limit:.3f}%", "p95_ttft_ms": "< 300"}, min_requests=min_requests)
    allowed = rules.conditions[0].limit
    evidence = evidence_of(answered=answered, failed=failed, ttft=ttft)
    found = judge(evidence, rules=rules, elapsed_seconds=elapsed)
    judged = answered + failed
    if found.verdict is Verdict.PROMOTE:
        assert judged >= min_requests and failed / judged <= allowed and answered and ttft < 300
    if found.verdict is Verdict.WAIT:
        assert judged < min_requests and elapsed < rules.window_seconds and failed <= allowed * min_requests + 1e-6
    if elapsed >= rules.window_seconds:
        assert found.verdict is not Verdict.WAIT
    if found.verdict is Verdict.ROLLBACK and judged < min_requests and elapsed < rules.window_seconds:
        # Lost early: no run of good answers could have saved it.
        rest = min_requests - judged
        saved = evidence_of(answered=answered + rest, failed=failed, ttft=1.0)
        assert judge(saved, rules=rules, elapsed_seconds=elapsed).verdict is Verdict.ROLLBACK


@settings(deadline=None, max_examples=60)
@given(parts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), TIMES), min_size=1, max_size=4))
def test_replicas_together_are_judged_as_one(parts):
    arms = [ArmCount(answered=a, failed=f, ttft_ms=times, latency_ms=times) for a, f, times in parts]
    together = merged([Evidence(challenger=arm, champion=arm) for arm in arms])
    whole = [value for arm in arms for value in arm.ttft_ms]
    assert together.challenger.judged == sum(arm.judged for arm in arms)
    assert sorted(together.challenger.ttft_ms) == sorted(whole)
    assert together.copies is None
    if whole:
        assert measured(together)["p95_ttft_ms"] == percentile(whole, 95)
        assert measured(together)["p95_ttft_ratio"] == 1.0


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(
        st.builds(
            CopyCount,
            equal=st.integers(0, 5),
            dropped=st.integers(0, 5),
            num_cosines=st.just(1),
            sum_cosines=st.floats(-1, 1),
            min_cosine=st.none() | st.floats(-1, 1),
            max_abs_error=st.none() | st.floats(0, 9),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_copies_of_replicas_add_up(parts):
    together = merged([Evidence(copies=part) for part in parts]).copies
    assert together.equal == sum(part.equal for part in parts)
    assert together.sum_cosines == pytest.approx(math.fsum(part.sum_cosines for part in parts))
    for name, of in (("min_cosine", min), ("max_abs_error", max)):
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        assert getattr(together, name) == (of(known) if known else None)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), p=st.sampled_from((50, 95, 99)))
def test_a_percentile_is_a_value_that_enough_values_do_not_exceed(values, p):
    found = percentile(values, p)
    assert found in values
    assert sum(value <= found for value in values) >= p / 100 * len(values)
    below = [value for value in values if value < found]
    assume(below)
    assert len(below) < p / 100 * len(values)
