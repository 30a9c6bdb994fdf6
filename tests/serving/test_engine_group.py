"""Two engines behind one, as a client and a health check see them."""

import queue
import threading

import pytest
from tiny_llama import LIMITS, WAIT_SECONDS

from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.engine_group import EngineGroup, shared_metrics
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason, Request, Sampling
from pipeline.serving.engine.token_rules import Chosen

TOKEN = 65
BUCKETS = Buckets.for_limits(slots=LIMITS.slots, context=LIMITS.context, chunk_tokens=LIMITS.chunk_tokens)


class CountingExecutor:
    """Answers every step with one token; waits at `gate` and can be told to fail."""

    def __init__(self):
        self.buckets = BUCKETS
        self.gate = threading.Event()
        self.gate.set()
        self.num_prefills = 0
        self.leaves = {"version": 0}
        self.failure = None

    def warm_up(self, *, on_progress=None):
        return 0.5

    def prefill(self, step, *, rules):
        self.gate.wait(WAIT_SECONDS)
        if self.failure is not None:
            raise self.failure
        self.num_prefills += 1
        return Chosen([TOKEN] if step.is_last else [])

    def decode(self, step, *, rules):
        self.gate.wait(WAIT_SECONDS)
        return [Chosen([TOKEN]) for _ in step.rows]

    def place(self, leaves):
        return dict(leaves)

    def exchange(self, placed):
        before, self.leaves = self.leaves, placed
        return before

    def on_host(self, arrays):
        return arrays


@pytest.fixture
def executors():
    return [CountingExecutor(), CountingExecutor()]


@pytest.fixture
def group(executors, vocabulary):
    metrics = Metrics(model="tiny")
    engines = [
        Engine(executor, decoder=vocabulary, limits=LIMITS, metrics=own)
        for executor, own in zip(executors, shared_metrics(metrics, size=2), strict=True)
    ]
    made = EngineGroup(engines, metrics=metrics)
    made.start(timeout_seconds=WAIT_SECONDS)
    yield made
    for executor in executors:
        executor.gate.set()
    made.stop(drain_seconds=10)


def submit(group, index, *, sink, max_tokens=3):
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    group.submit(Request(request_id=f"r{index}", prompt=(5, 6, 7), sampling=sampling), sink=sink)


def ends(found, number):
    """The finish reason of so many requests."""
    ended = {}
    while len(ended) < number:
        for chunk in found.get(timeout=WAIT_SECONDS):
            if chunk.finish is not None:
                ended[chunk.request_id] = chunk.finish
    return ended


def test_requests_are_shared_out_and_all_are_answered(group, executors):
    found = queue.Queue()
    for executor in executors:
        executor.gate.clear()
    for index in range(8):
        submit(group, index, sink=found.put)
    for executor in executors:
        executor.gate.set()
    assert set(ends(found, 8).values()) == {FinishReason.LENGTH}
    assert [executor.num_prefills for executor in executors] == [4, 4]
    assert group.metrics.value("generation_tokens_total") == 24
    assert group.limits.slots == 2 * LIMITS.slots and group.warm_up_seconds == 0.5


def test_a_request_is_cancelled_wherever_it_is(group, executors):
    found = queue.Queue()
    for executor in executors:
        executor.gate.clear()
    for index in range(2):
        submit(group, index, sink=found.put, max_tokens=100)
    for index in range(2):
        group.cancel(f"r{index}")
    for executor in executors:
        executor.gate.set()
    assert set(ends(found, 2).values()) == {FinishReason.ABORT}


def test_parameters_of_every_engine_are_exchanged(group, executors):
    swapped = group.swap({"version": 1}, label="second")
    assert [executor.leaves["version"] for executor in executors] == [1, 1]
    assert swapped.leaves == {"version": 0} and group.version == "second"


def test_one_engine_that_fails_makes_the_replica_unhealthy(group, executors):
    assert group.status().is_ready
    executors[1].failure = RuntimeError("device lost")
    found = queue.Queue()
    for index in range(2):
        submit(group, index, sink=found.put)
    assert sorted(ends(found, 2).values()) == [FinishReason.ERROR, FinishReason.LENGTH]
    assert "device lost" in group.status().failure and not group.status().is_ready


def test_a_drained_group_takes_nothing_more(group):
    group.stop(drain_seconds=1)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        submit(group, 0, sink=print)


def test_gauges_of_the_engines_are_summed_and_shares_are_averaged():
    common = Metrics(model="tiny")
    for own, running, usage in zip(shared_metrics(common, size=2), (3, 1), (0.5, 0.1), strict=True):
        own.gauge("num_requests_running", running)
        own.gauge("kv_cache_usage_perc", usage)
    assert common.value("num_requests_running") == 4
    assert common.value("kv_cache_usage_perc") == pytest.approx(0.3)
