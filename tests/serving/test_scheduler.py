"""The scheduler: decode first, one chunk between, first come first served, no slot lost."""

import random
from dataclasses import replace

import pytest

from pipeline.serving.engine.buckets import Buckets, smallest_fit
from pipeline.serving.engine.request import FinishReason, Request, Sampling
from pipeline.serving.engine.scheduler import Limits, Scheduler

LIMITS = Limits(slots=2, context=512, chunk_tokens=64, decode_steps=4)
BUCKETS = Buckets.for_limits(slots=2, context=512, chunk_tokens=64, smallest_attention=128)


def request(name, length, num, stop_ids=()):
    return Request(
        request_id=name, prompt=tuple(range(length)), sampling=Sampling(max_tokens=num, stop_ids=tuple(stop_ids))
    )


def make(*requests):
    scheduler = Scheduler(LIMITS, buckets=BUCKETS)
    for index, one in enumerate(requests):
        scheduler.add(one, now=float(index))
    return scheduler


def prefill_all(scheduler):
    while (step := scheduler.next_prefill(budget=64)) is not None:
        scheduler.prefilled(step, tokens=[9])


def test_a_long_prompt_is_cut_into_chunks_and_padded_to_buckets():
    scheduler = make(request("a", 150, 5))
    scheduler.admit(now=0.0)
    steps = []
    while (step := scheduler.next_prefill(budget=64)) is not None:
        steps.append(step)
        scheduler.prefilled(step, tokens=[1])
    assert [(step.start, len(step.tokens), step.padded_to, step.is_last) for step in steps] == [
        (0, 64, 64, False),
        (64, 64, 64, False),
        (128, 22, 32, True),
    ]
    assert [step.attention_length for step in steps] == [128, 128, 256]


def test_a_running_request_gets_one_token_for_each_chunk_of_a_newcomer():
    scheduler = make(request("a", 10, 50), request("b", 200, 5))
    scheduler.admit(now=0.0)
    first = scheduler.next_prefill(budget=64)
    assert first.request_id == "a"
    scheduler.prefilled(first, tokens=[1])
    for _ in range(4):
        decode = scheduler.next_decode()
        assert decode.steps == 1 and [row.request_id for row in decode.rows] == ["a"]
        scheduler.decoded(decode, tokens=[[2]])
        scheduler.prefilled(scheduler.next_prefill(budget=64), tokens=[3])
    decode = scheduler.next_decode()
    assert decode.steps == 4 and {row.request_id for row in decode.rows} == {"a", "b"}


def test_slots_are_given_in_order_of_arrival_and_waiting_is_measured():
    scheduler = make(*(request(name, 5, 2) for name in "abc"))
    assert scheduler.admit(now=10.0) == [("a", 10.0), ("b", 9.0)]
    assert scheduler.num_waiting == 1
    scheduler.remove("a")
    assert scheduler.admit(now=12.0) == [("c", 10.0)]


def test_budget_and_steps_never_pass_max_tokens():
    scheduler = make(request("a", 5, 3), request("b", 5, 30))
    scheduler.admit(now=0.0)
    prefill_all(scheduler)
    decode = scheduler.next_decode()
    assert {row.request_id: row.budget for row in decode.rows} == {"a": 2, "b": 4}
    finished = scheduler.decoded(decode, tokens=[[4, 4], [4, 4, 4, 4]])
    assert [progress.finish for progress in finished] == [FinishReason.LENGTH, None]


def test_a_stop_token_finishes_and_one_token_requests_end_with_prefill():
    scheduler = make(request("a", 5, 9, stop_ids=[7]), request("b", 5, 1))
    scheduler.admit(now=0.0)
    first, second = (scheduler.prefilled(scheduler.next_prefill(budget=64), tokens=[3]) for _ in range(2))
    assert first.finish is None and second.finish is FinishReason.LENGTH
    (progress,) = scheduler.decoded(scheduler.next_decode(), tokens=[[3, 7]])
    assert progress.finish is FinishReason.STOP and progress.tokens == (3, 7)
    assert not scheduler.has_work and scheduler.why_unbalanced() is None


def test_short_prompts_share_one_chunk_of_prefill_between_two_decodes():
    scheduler = Scheduler(replace(LIMITS, slots=8), buckets=replace(BUCKETS, decode_batches=(1, 8)))
    for index in range(6):
        scheduler.add(request(f"{index}", 9, 5), now=0.0)
    scheduler.admit(now=0.0)
    budget, ran = LIMITS.chunk_tokens, []
    while (step := scheduler.next_prefill(budget=budget)) is not None:
        budget -= step.padded_to
        ran.append(step.request_id)
        scheduler.prefilled(step, tokens=[1])
    assert ran == ["0", "1", "2", "3"] and budget == 0  # four times 16 padded tokens
    assert scheduler.next_decode().steps == 1  # two prompts wait for their first token


def test_where_nothing_decodes_a_long_prompt_takes_larger_chunks_while_they_are_full():
    buckets = replace(BUCKETS, chunks=(16, 32, 64, 256))
    scheduler = Scheduler(LIMITS, buckets=buckets)
    scheduler.add(request("a", 400, 5), now=0.0)
    scheduler.admit(now=0.0)
    assert scheduler.prefill_budget == 256
    steps = []
    while (step := scheduler.next_prefill(budget=scheduler.prefill_budget)) is not None:
        steps.append((step.start, len(step.tokens), step.padded_to))
        scheduler.prefilled(step, tokens=[1] if step.is_last else [])
    assert steps == [(0, 256, 256), (256, 64, 64), (320, 64, 64), (384, 16, 16)]
    # Now it decodes, and the next prompt must not hold up its tokens.
    scheduler.add(request("b", 400, 5), now=0.0)
    scheduler.admit(now=0.0)
    assert scheduler.prefill_budget == LIMITS.chunk_tokens
    assert scheduler.next_prefill(budget=scheduler.prefill_budget).padded_to == 64


def test_where_a_request_waits_for_a_slot_no_call_outlasts_the_one_that_ends_first():
    scheduler = make(request("a", 5, 3), request("b", 5, 30), request("waits", 5, 30))
    scheduler.admit(now=0.0)
    prefill_all(scheduler)
    assert scheduler.next_decode().steps == 2
    scheduler.remove("waits")
    assert scheduler.next_decode().steps == LIMITS.decode_steps


def test_a_shared_beginning_is_copied_from_a_slot_that_runs_and_only_the_rest_is_computed():
    limits = replace(LIMITS, prefix_granularity=32)
    scheduler = Scheduler(limits, buckets=replace(BUCKETS, copies=(128, 512)))
    scheduler.add(request("a", 100, 9), now=0.0)
    scheduler.add(request("b", 100, 9), now=0.0)
    scheduler.admit(now=0.0)
    steps = []
    while (step := scheduler.next_prefill(budget=64)) is not None:
        steps.append(step)
        scheduler.prefilled(step, tokens=[1] if step.is_last else [])
    assert [(step.request_id, step.start, len(step.tokens)) for step in steps] == [
        ("a", 0, 64),
        ("a", 64, 36),
        ("b", 96, 4),
    ]
    assert [step.copies_from for step in steps] == [None, None, steps[0].slot]
    assert steps[2].copied_length == 128 and steps[2].is_first and steps[2].is_last
    assert scheduler.num_cached_tokens == 200


def test_a_deterministic_server_reuses_whole_chunks_and_no_generated_token():
    limits = replace(LIMITS, slots=1, prefix_granularity=32, is_deterministic=True)
    scheduler = Scheduler(limits, buckets=BUCKETS)
    scheduler.add(request("a", 100, 60), now=0.0)
    scheduler.admit(now=0.0)
    prefill_all(scheduler)
    while (decode := scheduler.next_decode()) is not None:
        scheduler.decoded(decode, tokens=[[100] * row.budget for row in decode.rows])
    scheduler.add(request("again", 100, 1), now=0.0)
    scheduler.admit(now=0.0)
    assert scheduler.next_prefill(budget=64).start == 64


def test_ten_thousand_random_events_lose_no_slot_and_respect_every_limit():
    rng = random.Random(0)
    scheduler = make()
    alive = set()
    for event in range(10_000):
        choice = rng.random()
        if choice < 0.2 and len(alive) < 20:
            name = str(event)
            scheduler.add(request(name, rng.randint(1, 300), rng.randint(1, 60), stop_ids=[0]), now=float(event))
            alive.add(name)
        elif choice < 0.3 and alive:
            name = rng.choice(sorted(alive))
            assert scheduler.remove(name)
            alive.discard(name)
        else:
            scheduler.admit(now=float(event))
            progress = []
            if (decode := scheduler.next_decode()) is not None:
                for row in decode.rows:
                    assert row.position + row.budget <= decode.attention_length <= LIMITS.context
                assert len(decode.rows) <= decode.padded_to
                new = [[rng.randint(0, 9) for _ in range(row.budget)] for row in decode.rows]
                cut = [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in new]
                progress = scheduler.decoded(decode, tokens=cut)
            if (prefill := scheduler.next_prefill(budget=64)) is not None:
                first = scheduler.prefilled(prefill, tokens=[rng.randint(0, 9)] if prefill.is_last else [])
                progress += [first] if first else []
            alive -= {one.request_id for one in progress if one.finish}
        assert scheduler.why_unbalanced() is None
        assert set(scheduler.request_ids) == alive
    assert not scheduler.remove("never")


def test_buckets_are_few_ascending_and_end_at_the_limit():
    buckets = Buckets.for_limits(slots=8, context=2048, chunk_tokens=64)
    assert buckets.decode_batches == (1, 8)
    assert buckets.decode_attention == (256, 512, 1024, 2048)
    assert buckets.prefill_attention == (256, 512, 1024, 2048)
    assert buckets.chunks == (16, 32, 64, 256)
    long = Buckets.for_limits(slots=8, context=9000, chunk_tokens=64)
    assert long.prefill_attention == (256, 512, 1024, 4096, 9000)
    assert smallest_fit(129, buckets.decode_attention) == 256
    tiny = Buckets.for_limits(slots=1, context=16, chunk_tokens=8)
    assert (tiny.decode_batches, tiny.decode_attention, tiny.chunks) == ((1,), (16,), (8,))
    whole = Buckets.for_limits(slots=8, context=2048, chunk_tokens=64, copies_prefixes=True, reads_in_place=True)
    assert (whole.decode_attention, whole.shared, whole.chunks) == ((2048,), (24, 72, 264), ())
    assert (whole.copies, whole.num_executables) == (buckets.prefill_attention, 2 + 3 + 4 + 2)


SHARED = Buckets.for_limits(slots=4, context=512, chunk_tokens=64, reads_in_place=True, copies_prefixes=True)


def sharing(*requests, **limits):
    scheduler = Scheduler(replace(LIMITS, slots=4, **limits), buckets=SHARED)
    for one in requests:
        scheduler.add(one, now=0.0)
    scheduler.admit(now=0.0)
    return scheduler


def take_in(scheduler, step):
    """As the engine does; the requests that got a token."""
    if step.decode is not None:
        scheduler.decoded(step.decode, tokens=[[2]] * len(step.rows))
    for one in step.prefills:
        scheduler.prefilled(one, tokens=[1])
    return step.asking


def test_prompts_share_a_pass_up_to_the_largest_where_nothing_decodes():
    scheduler = sharing(*(request(name, length, 9) for name, length in zip("abcd", (100, 50, 200, 30), strict=True)))
    first = scheduler.next_shared()
    assert [(one.request_id, one.start, len(one.tokens), one.is_last) for one in first.prefills] == [
        ("a", 0, 100, True),
        ("b", 0, 50, True),
        ("c", 0, 106, False),
    ]
    assert (first.decode, first.num_tokens, first.padded_to, first.asking) == (None, 256, 260, ("a", "b"))


def test_beside_rows_that_decode_a_pass_takes_one_chunk_of_prompts():
    scheduler = sharing(request("a", 10, 50), request("b", 20, 1))
    assert take_in(scheduler, scheduler.next_shared()) == ("a", "b")
    scheduler.add(request("c", 50, 5), now=1.0)
    scheduler.add(request("d", 70, 5), now=1.0)
    scheduler.admit(now=1.0)
    second = scheduler.next_shared()
    assert [row.request_id for row in second.rows] == ["a"] and second.decode.steps == 1
    assert [(one.request_id, len(one.tokens)) for one in second.prefills] == [("c", 50), ("d", 14)]
    assert (second.num_tokens, second.padded_to) == (65, 68)
    assert take_in(scheduler, second) == ("a", "c")
    third = scheduler.next_shared()
    assert [row.request_id for row in third.rows] == ["a", "c"]
    assert [(one.start, len(one.tokens), one.is_last) for one in third.prefills] == [(14, 56, True)]
    assert take_in(scheduler, third) == ("a", "c", "d")
    assert scheduler.next_shared() is None and scheduler.next_decode().steps == 4


def test_prompts_whose_beginning_is_cached_share_a_pass():
    alike = [request(name, 40 + index, 9) for index, name in enumerate("abc")]
    other = replace(request("d", 30, 9), prompt=tuple(range(100, 130)))
    scheduler = sharing(*alike, other, prefix_granularity=16)
    first = scheduler.next_shared()
    assert [one.request_id for one in first.prefills] == ["a", "d"]  # who waits for a beginning holds nobody up
    take_in(scheduler, first)
    second = scheduler.next_shared()
    assert [(one.request_id, one.start, one.copies_from) for one in second.prefills] == [("b", 32, 0), ("c", 32, 0)]


@pytest.mark.parametrize("granularity", [0, 4])
@pytest.mark.parametrize("slots", [1, 3])
def test_every_token_of_random_shared_passes_sees_its_own_beginning(slots, granularity):
    """The device is played by lists: what each slot's cache holds, position by position."""
    rng = random.Random(slots + granularity)
    limits = Limits(slots=slots, context=48, chunk_tokens=8, decode_steps=4, prefix_granularity=granularity)
    buckets = Buckets.for_limits(slots=slots, context=48, chunk_tokens=8, reads_in_place=True, copies_prefixes=True)
    scheduler = Scheduler(limits, buckets=buckets)
    caches = [[None] * limits.context for _ in range(slots)]
    whole = {}  # every token of a request that is not finished

    def compute(rows):
        for _, slot, position, token in rows:
            caches[slot][position] = token
        for name, slot, position, _ in rows:
            assert caches[slot][: position + 1] == whole[name][: position + 1]

    def note(progress):
        for one in progress:
            whole[one.request_id].extend(one.tokens)
            if one.finish:
                del whole[one.request_id]

    num_shared = num_copies = 0
    for number in range(2500):
        if len(whole) < 5 and rng.random() < 0.6:
            length = rng.randint(1, 30)
            prompt = tuple([7] * (length // 2) + [rng.randint(0, 2) for _ in range(length - length // 2)])
            sampling = Sampling(max_tokens=rng.randint(1, 9))
            scheduler.add(Request(request_id=f"r{number}", prompt=prompt, sampling=sampling), now=0.0)
            whole[f"r{number}"] = list(prompt)
        if whole and rng.random() < 0.05:
            gone = rng.choice(sorted(whole))
            scheduler.remove(gone)
            del whole[gone]
        scheduler.admit(now=0.0)
        step = scheduler.next_shared()
        if step is not None:
            num_shared += 1
            assert step.num_tokens <= step.padded_to and len(step.asking) <= slots
            for one in step.prefills:
                if one.copies_from is not None:
                    num_copies += 1
                    caches[one.slot][: one.copied_length] = caches[one.copies_from][: one.copied_length]
            rows = [(row.request_id, row.slot, row.position, row.token) for row in step.rows]
            for one in step.prefills:
                places = range(one.start, one.start + len(one.tokens))
                rows += [(one.request_id, one.slot, *at) for at in zip(places, one.tokens, strict=True)]
            compute(rows)
            if step.decode is not None:
                note(scheduler.decoded(step.decode, tokens=[[rng.randint(0, 2)] for _ in step.rows]))
            for one in step.prefills:
                progress = scheduler.prefilled(one, tokens=[rng.randint(0, 2)])
                note([progress] if progress else [])
        elif (decode := scheduler.next_decode()) is not None:
            compute([(row.request_id, row.slot, row.position, row.token) for row in decode.rows])
            note(scheduler.decoded(decode, tokens=[[rng.randint(0, 2)] for _ in decode.rows]))
        assert scheduler.why_unbalanced() is None
        assert set(scheduler.request_ids) == set(whole)
    assert num_shared > 400
    assert (num_copies > 50) == (granularity > 0 and slots > 1)


def test_where_experts_compute_padding_only_full_passes_are_large():
    buckets = Buckets.for_limits(slots=4, context=512, chunk_tokens=64, reads_in_place=True, has_experts=True)
    assert buckets.shared == (20, 36, 68, 260)
    for length, padded_to in ((80, 68), (300, 260)):
        scheduler = Scheduler(replace(LIMITS, slots=4), buckets=buckets)
        scheduler.add(request("a", length, 9), now=0.0)
        scheduler.admit(now=0.0)
        assert scheduler.next_shared().padded_to == padded_to


def test_a_prompt_that_begins_like_another_of_the_pass_waits_and_copies_from_it():
    scheduler = sharing(request("a", 40, 9), request("b", 48, 9), prefix_granularity=16)
    first = scheduler.next_shared()
    assert [one.request_id for one in first.prefills] == ["a"]
    take_in(scheduler, first)
    (second,) = scheduler.next_shared().prefills
    assert (second.request_id, second.start, len(second.tokens), second.copies_from) == ("b", 32, 16, 0)
