"""Hours of requests, compressed: nothing is kept of those that are gone.

Each soak has a process of its own. What is resident in one that ran other tests moves by what their memory becomes.
"""

import gc
import random
import threading

import psutil
from tiny_llama import (
    CONFIG,
    LIMITS,
    VOCABULARY,
    Device,
    eventually,
    make_tokenizer,
    prompt_of,
    random_leaves,
    request,
    warm_executor,
)

from pipeline.models.checkpoint import build_model
from pipeline.models.registry import describe_config
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.grammar.vocabulary import Vocabulary

NUM_SOAKED = 20_000
GROWN_OBJECTS = 500
"""One object kept for each request would be 18,000 more; -1 measured."""
GROWN_BYTES = 8 * 2**20
"""Resident; 0.3 MiB measured for 18,000 requests, 1.4 MiB for 300 on the device."""


def soak(engine, num, *, longest_prompt, longest_answer):
    """Keeps the queue filled with `num` requests, of which some are aborted, and waits for the last."""
    rng = random.Random(num)
    open_requests = threading.Semaphore(200)

    def sink(chunks):
        for chunk in chunks:
            if chunk.finish is not None:
                open_requests.release()

    shared = prompt_of(longest_prompt, seed=1)
    for index in range(num):
        open_requests.acquire(timeout=60)
        prompt = shared[: rng.randint(1, longest_prompt // 2)] + shared[: rng.randint(1, longest_prompt // 2)]
        engine.submit(request(f"r{index}", prompt, rng.randint(1, longest_answer)), sink=sink)
        if index % 10 == 0:
            engine.cancel(f"r{index}")
    for _ in range(200):
        assert open_requests.acquire(timeout=60)
    eventually(lambda: engine.why_unbalanced() is None)


def started(executor, limits, **how):
    vocabulary = Vocabulary(make_tokenizer(), num_tokens=VOCABULARY, stop_ids=(0,))
    engine = Engine(executor, decoder=vocabulary, limits=limits, metrics=Metrics(model="tiny"), **how)
    engine.start(timeout_seconds=60)
    return engine


def grown(engine, first, then, **lengths):
    """Objects and resident bytes that `then` more requests leave behind, after `first` of them."""

    def measured():
        gc.collect()
        return len(gc.get_objects()), psutil.Process().memory_info().rss

    soak(engine, first, **lengths)
    before = measured()
    soak(engine, then, **lengths)
    return [after - was for was, after in zip(before, measured(), strict=True)]


def without_a_device():
    limits = Limits(slots=32, context=160, chunk_tokens=32, decode_steps=4, prefix_granularity=16)
    engine = started(Device(limits), limits)
    objects, resident = grown(engine, 2000, NUM_SOAKED - 2000, longest_prompt=60, longest_answer=6)
    num_answered = engine.metrics.value("request_success_total", label="length")
    engine.stop(drain_seconds=10)
    return objects, resident, num_answered


def on_the_device():
    model = build_model(describe_config(CONFIG), random_leaves(), dtype="float32", source="test")
    engine = started(warm_executor(model), LIMITS, strict=True)
    objects, resident = grown(engine, 100, 300, longest_prompt=120, longest_answer=20)
    num_compiles = engine.status().num_compiles_while_serving
    num_hits = engine.metrics.value("prefix_cache_hits_total")
    engine.stop(drain_seconds=10)
    return objects, resident, num_compiles, num_hits


def test_twenty_thousand_requests_leave_memory_flat(in_a_process):
    objects, resident, num_answered = in_a_process(without_a_device)
    assert objects < GROWN_OBJECTS
    assert resident < GROWN_BYTES
    assert num_answered > 0.85 * NUM_SOAKED


def test_three_hundred_requests_on_the_device_leave_memory_flat(in_a_process):
    objects, resident, num_compiles, num_hits = in_a_process(on_the_device)
    assert objects < GROWN_OBJECTS
    assert resident < GROWN_BYTES
    assert num_compiles == 0
    assert num_hits > 0
