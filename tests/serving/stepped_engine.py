"""An engine whose steps a test lets through one by one, or that takes its time for each; without a model."""

import threading
import time

from tiny_llama import WAIT_SECONDS

from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.token_rules import Chosen

TOKEN = 65
STEPPED_LIMITS = Limits(slots=4, context=160, chunk_tokens=32, decode_steps=1, max_waiting=400)


class SteppedExecutor:
    """Answers every step with one token, when it may."""

    def __init__(self, *, step_seconds=None):
        """`step_seconds` of each step; None waits for `allow`."""
        self.buckets = Buckets.for_limits(
            slots=STEPPED_LIMITS.slots, context=STEPPED_LIMITS.context, chunk_tokens=STEPPED_LIMITS.chunk_tokens
        )
        self.num_decodes = 0
        self._step_seconds = step_seconds
        self._permits = threading.Semaphore(0)

    def allow(self, num_steps=1):
        self._permits.release(num_steps)

    def warm_up(self, *, on_progress=None):
        return 0.0

    def prefill(self, step, *, rules):
        self._wait()
        return Chosen([TOKEN] if step.is_last else [])

    def decode(self, step, *, rules):
        self._wait()
        self.num_decodes += 1
        return [Chosen([TOKEN]) for _ in step.rows]

    def _wait(self):
        if self._step_seconds is None:
            assert self._permits.acquire(timeout=WAIT_SECONDS)
        else:
            time.sleep(self._step_seconds)


def stepped_engine(executor, vocabulary, *, limits=STEPPED_LIMITS):
    engine = Engine(executor, decoder=vocabulary, limits=limits, metrics=Metrics(model="tiny"))
    engine.start(timeout_seconds=WAIT_SECONDS)
    return engine
