"""Whatever is aborted, fails or goes on for long: slots, cache and memory stay exact, and nobody waits for ever."""

import random
import threading
import time

import pytest
from tiny_llama import LIMITS, Device, Reader, eventually, greedy, prompt_of, request

from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason
from pipeline.serving.engine.scheduler import Limits

NUM_ABORTED = 1000


@pytest.fixture
def start(vocabulary):
    """Starts an engine over a device; stops them all."""
    started = []

    def begin(device, limits=LIMITS):
        engine = Engine(device, decoder=vocabulary, limits=limits, metrics=Metrics(model="tiny"))
        engine.start(timeout_seconds=60)
        started.append(engine)
        return engine

    yield begin
    for engine in started:
        engine.stop(drain_seconds=1)


def test_a_thousand_requests_aborted_at_random_moments_leave_slots_queue_and_cache_exact(engine, model, tokenizer):
    rng = random.Random(7)
    reader = Reader()
    names = [f"r{index}" for index in range(NUM_ABORTED)]
    submitted = []

    def abort():
        for _ in range(NUM_ABORTED):
            time.sleep(rng.random() * 0.002)
            if submitted:
                engine.cancel(rng.choice(submitted[-40:]))

    thread = threading.Thread(target=abort)
    thread.start()
    shared = prompt_of(50, seed=3)
    for index, name in enumerate(names):
        prompt = shared[: index % 50] + prompt_of(1 + index % 60, seed=index)
        while engine.status().num_waiting > 30:
            time.sleep(0.001)
        engine.submit(request(name, prompt, 1 + index % 40), sink=reader)
        submitted.append(name)
    reader.wait(NUM_ABORTED)
    thread.join()
    eventually(lambda: engine.why_unbalanced() is None)
    finishes = [reader.finish(name) for name in names]
    aborted = finishes.count(FinishReason.ABORT)
    assert aborted == engine.metrics.value("aborted_requests_total", label="client") > 100
    assert finishes.count(FinishReason.LENGTH) > 100
    assert aborted + finishes.count(FinishReason.LENGTH) + finishes.count(FinishReason.STOP) == NUM_ABORTED
    assert engine.metrics.value("num_requests_running") == 0
    assert engine.metrics.value("kv_cache_usage_perc") == 0
    prompt = prompt_of(40, seed=99)
    engine.submit(request("after", prompt, 10), sink=reader)
    reader.wait(1)
    assert reader.text("after") == tokenizer.decode(greedy(model, prompt, 10))


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_failing_device_answers_everybody_says_so_and_takes_nothing_new(start, where):
    entered, fails = threading.Event(), threading.Event()

    def fail(step):
        entered.set()
        fails.wait(timeout=60)
        raise MemoryError("out of device memory")

    engine = start(Device(LIMITS, **{f"before_{where}": fail}))
    reader = Reader()
    for index in range(6):
        engine.submit(request(str(index), [1, 2, 3], 8), sink=reader)
    entered.wait(timeout=60)
    refused = []

    def swap():
        with pytest.raises(EngineUnavailable, match="out of device memory"):
            engine.swap({})
        refused.append(True)

    swapping = threading.Thread(target=swap)
    swapping.start()
    eventually(lambda: engine._swaps)
    fails.set()
    reader.wait(6)
    swapping.join(timeout=60)
    assert refused
    assert {reader.finish(str(index)) for index in range(6)} == {FinishReason.ERROR}
    assert "out of device memory" in engine.status().failure
    assert not engine.status().is_ready
    with pytest.raises(EngineUnavailable, match="out of device memory"):
        engine.submit(request("late", [1], 1), sink=reader)


def test_parameters_that_a_stalled_engine_does_not_take_are_refused_and_never_applied(start, monkeypatch):
    monkeypatch.setattr("pipeline.serving.engine.engine.STALL_SECONDS", 0.1)
    goes_on = threading.Event()
    device = Device(LIMITS, before_decode=lambda step: goes_on.wait(timeout=60))
    device.exchange = lambda placed: pytest.fail("applied")
    engine = start(device)
    reader = Reader()
    engine.submit(request("a", [1, 2, 3], 30), sink=reader)
    reader.wait_for_chunk("a")
    with pytest.raises(EngineUnavailable, match="the old ones stay"):
        engine.swap({}, wait_seconds=0.0)
    goes_on.set()
    reader.wait(1)
    assert reader.finish("a") is FinishReason.LENGTH
    assert engine.status().failure is None


@pytest.mark.parametrize("gone_by", ["cancel", "a sink that raises"])
def test_a_client_that_is_gone_frees_its_slot_within_one_step(start, gone_by):
    """The step that runs when it goes is the last that computes for it."""
    computed, may_go_on = [], threading.Semaphore(0)

    def before_decode(step):
        computed.append({row.request_id for row in step.rows})
        may_go_on.acquire(timeout=60)

    limits = Limits(slots=2, context=160, chunk_tokens=32, decode_steps=1)
    engine = start(Device(limits, before_decode=before_decode), limits)
    reader = Reader()

    def gone(chunks):
        if len(computed) >= 3:
            raise ConnectionError("the client is gone")

    engine.submit(request("gone", [1, 2, 3], 100), sink=gone if gone_by != "cancel" else Reader())
    engine.submit(request("stays", [4, 5, 6], 100), sink=reader)
    may_go_on.release(2)  # exactly two steps end; the third is held
    eventually(lambda: len(computed) == 3)
    if gone_by == "cancel":
        engine.cancel("gone")
    num_before = len(computed)
    for _ in range(200):
        may_go_on.release()
    reader.wait(1)
    assert not any("gone" in rows for rows in computed[num_before:])
    assert reader.finish("stays") is FinishReason.LENGTH
    eventually(lambda: engine.why_unbalanced() is None)
