"""Rows of several requests share a pass, wait a bounded time, and fail alone."""

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.serving.engine.batch_client import ask
from pipeline.serving.engine.batch_request import BatchAnswer, BatchRequest, Row
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.micro_batcher import MAX_FAILURES_IN_A_ROW, BatchLimits, MicroBatcher

WAIT_SECONDS = 10.0


class Doubler:
    """Doubles `x`; notes its batches, can be held, and refuses negative numbers."""

    num_executables = 3

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_running = threading.Event()
        self.broken = False
        self.factor = 2

    def place(self, leaves: int) -> int:
        return leaves

    def exchange(self, placed: int) -> int:
        before, self.factor = self.factor, placed
        return before

    def on_host(self, state: int) -> int:
        return state

    def warm_up(self, *, on_progress=None) -> float:
        return 0.25

    def bucket(self, length: int) -> int:
        return 8 if length <= 8 else 32

    def run(self, rows: Sequence[Row]) -> list[dict[str, np.ndarray]]:
        self.is_running.set()
        assert self.may_run.wait(WAIT_SECONDS)
        values = [float(row.inputs["x"]) for row in rows]
        if self.broken or min(values) < 0:
            raise ValueError(f"cannot double {values}")
        self.batches.append(values)
        return [{"y": np.float32(self.factor * value)} for value in values]


class Client:
    """Collects answers."""

    def __init__(self) -> None:
        self.answers: dict[str, BatchAnswer] = {}
        self._arrived = threading.Condition()

    def __call__(self, answer: BatchAnswer) -> None:
        with self._arrived:
            assert answer.request_id not in self.answers, "answered twice"
            self.answers[answer.request_id] = answer
            self._arrived.notify_all()

    def wait(self, *names: str) -> list[BatchAnswer]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: all(name in self.answers for name in names), WAIT_SECONDS)
        return [self.answers[name] for name in names]


def asked(name: str, *values: float, length: int = 0) -> BatchRequest:
    rows = [Row(inputs={"x": np.float32(value)}, length=length) for value in values]
    return BatchRequest(request_id=name, rows=rows)


@pytest.fixture
def executor() -> Doubler:
    return Doubler()


@pytest.fixture
def make_batcher(executor: Doubler):
    made = []

    def make(**limits) -> MicroBatcher:
        given = {"max_batch_rows": 4, "wait_seconds": 0.02, **limits}
        batcher = MicroBatcher(executor, limits=BatchLimits(**given), metrics=Metrics(model="m"))
        batcher.start(timeout_seconds=WAIT_SECONDS)
        made.append(batcher)
        return batcher

    yield make
    executor.may_run.set()
    for batcher in made:
        batcher.stop(drain_seconds=1.0)


@pytest.fixture
def held(make_batcher, executor: Doubler) -> MicroBatcher:
    """A batcher whose device is busy with a request `first`."""
    batcher = make_batcher()
    executor.may_run.clear()
    batcher.submit(asked("first", 0.0), sink=lambda _: None)
    assert executor.is_running.wait(WAIT_SECONDS)
    return batcher


def test_rows_that_arrive_while_the_device_is_busy_run_together(held, executor) -> None:
    client = Client()
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        held.submit(asked(name, value), sink=client)
    executor.may_run.set()
    answers = client.wait("a", "b", "c")
    assert [float(answer.rows[0]["y"]) for answer in answers] == [2.0, 4.0, 6.0]
    assert executor.batches == [[0.0], [1.0, 2.0, 3.0]]
    assert held.metrics.value("batches_total") == 2
    assert held.metrics.value("rows_total") == 4


def test_a_long_request_is_cut_and_comes_back_in_order(make_batcher, executor) -> None:
    client = Client()
    make_batcher().submit(asked("long", *range(10)), sink=client)
    (answer,) = client.wait("long")
    np.testing.assert_array_equal(answer.stacked()["y"], 2.0 * np.arange(10))
    assert [len(batch) for batch in executor.batches] == [4, 4, 2]


def test_a_lone_row_waits_no_longer_than_it_is_told(make_batcher) -> None:
    client = Client()
    batcher = make_batcher(wait_seconds=0.05)
    started = time.monotonic()
    batcher.submit(asked("alone", 1.0), sink=client)
    client.wait("alone")
    assert 0.04 <= time.monotonic() - started < 2.0


def test_a_full_batch_does_not_wait(make_batcher) -> None:
    client = Client()
    batcher = make_batcher(wait_seconds=1.0)
    started = time.monotonic()
    batcher.submit(asked("full", 1.0, 2.0, 3.0, 4.0), sink=client)
    client.wait("full")
    assert time.monotonic() - started < 0.9


def test_short_texts_are_not_padded_to_a_long_one_and_nobody_starves(held, executor) -> None:
    client = Client()
    held.submit(asked("short", 1.0, length=3), sink=client)
    held.submit(asked("long", 2.0, length=20), sink=client)
    held.submit(asked("short too", 3.0, length=8), sink=client)
    executor.may_run.set()
    client.wait("short", "long", "short too")
    assert executor.batches == [[0.0], [1.0, 3.0], [2.0]]


def test_a_cancelled_request_never_runs_and_is_never_answered(held, executor) -> None:
    client = Client()
    held.submit(asked("gone", 1.0), sink=client)
    held.submit(asked("stays", 2.0), sink=client)
    held.cancel("gone")
    held.cancel("gone")
    held.cancel("unknown")
    executor.may_run.set()
    client.wait("stays")
    assert executor.batches == [[0.0], [2.0]]
    assert "gone" not in client.answers
    assert held.metrics.value("aborted_requests_total", label="client") == 1


def test_a_coroutine_that_is_cancelled_takes_its_request_back(held, executor) -> None:
    async def leave() -> None:
        asking = asyncio.ensure_future(ask(held, asked("gone", 1.0)))
        staying = asyncio.ensure_future(ask(held, asked("stays", 2.0)))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        executor.may_run.set()
        assert float((await staying).rows[0]["y"]) == 4.0

    asyncio.run(leave())
    assert executor.batches == [[0.0], [2.0]]


def test_a_request_that_fails_fails_alone(held, executor) -> None:
    client = Client()
    held.submit(asked("good", 1.0), sink=client)
    held.submit(asked("bad", -1.0), sink=client)
    held.submit(asked("good too", 2.0), sink=client)
    executor.may_run.set()
    good, bad, too = client.wait("good", "bad", "good too")
    assert (float(good.rows[0]["y"]), float(too.rows[0]["y"])) == (2.0, 4.0)
    assert bad.error == "ValueError: cannot double [-1.0]" and not bad.rows
    assert held.status().is_ready
    assert held.metrics.value("aborted_requests_total", label="error") == 1


def test_a_broken_device_ends_the_batcher_and_nobody_hangs(make_batcher, executor) -> None:
    batcher, client = make_batcher(), Client()
    executor.broken = True
    names = [f"r{index}" for index in range(MAX_FAILURES_IN_A_ROW)]
    for name in names:
        batcher.submit(asked(name, 1.0), sink=client)
    assert all("cannot double" in answer.error for answer in client.wait(*names))
    deadline = time.monotonic() + WAIT_SECONDS
    while batcher.status().failure is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "in a row failed" in batcher.status().failure
    with pytest.raises(EngineUnavailable, match="in a row failed"):
        batcher.submit(asked("late", 1.0), sink=client)


def test_a_reader_that_raises_does_not_stop_the_others(held, executor) -> None:
    client = Client()

    def broken(_: BatchAnswer) -> None:
        raise OSError("gone")

    held.submit(asked("broken", 1.0), sink=broken)
    held.submit(asked("fine", 2.0), sink=client)
    executor.may_run.set()
    client.wait("fine")
    assert held.status().failure is None


def test_a_full_queue_is_refused(make_batcher, executor) -> None:
    batcher = make_batcher(max_waiting_rows=3)
    executor.may_run.clear()
    batcher.submit(asked("first", 0.0), sink=lambda _: None)
    assert executor.is_running.wait(WAIT_SECONDS)
    batcher.submit(asked("a", 1.0, 2.0), sink=lambda _: None)
    with pytest.raises(EngineUnavailable, match="2 of 3 rows wait already"):
        batcher.submit(asked("b", 1.0, 2.0), sink=lambda _: None)
    assert batcher.status().num_waiting == 2


def test_stopping_lets_what_waits_finish_and_refuses_the_rest(held, executor) -> None:
    client = Client()
    held.submit(asked("waits", 1.0), sink=client)
    stopper = threading.Thread(target=held.stop, kwargs={"drain_seconds": 5.0})
    stopper.start()
    while held.status().is_ready:
        time.sleep(0.001)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        held.submit(asked("late", 1.0), sink=client)
    executor.may_run.set()
    stopper.join(WAIT_SECONDS)
    assert float(client.wait("waits")[0].rows[0]["y"]) == 2.0


def test_a_drain_that_takes_too_long_answers_with_an_error(held, executor) -> None:
    client = Client()
    held.submit(asked("waits", 1.0), sink=client)
    stopper = threading.Thread(target=held.stop, kwargs={"drain_seconds": 0.0})
    stopper.start()
    while not held._is_stopping:
        time.sleep(0.001)
    executor.may_run.set()
    stopper.join(WAIT_SECONDS)
    assert client.wait("waits")[0].error == "the server shut down"


def test_a_warm_up_that_fails_is_said_at_the_start(executor) -> None:
    def fail(**_) -> float:
        raise ValueError("no such shape")

    executor.warm_up = fail
    batcher = MicroBatcher(executor, limits=BatchLimits(max_batch_rows=4, wait_seconds=0.0), metrics=Metrics(model="m"))
    with pytest.raises(EngineUnavailable, match="ValueError: no such shape"):
        batcher.start(timeout_seconds=WAIT_SECONDS)


def test_a_request_that_began_ends_with_the_old_parameters_and_what_comes_later_has_the_new(executor, make_batcher):
    batcher, client = make_batcher(max_batch_rows=2), Client()
    batcher.version = "old"
    executor.may_run.clear()
    batcher.submit(asked("long", 1, 2, 3, 4, 5), sink=client)
    assert executor.is_running.wait(WAIT_SECONDS)
    returned: list[int] = []
    swapping = threading.Thread(target=lambda: returned.append(batcher.swap(3, label="new")))
    swapping.start()
    while not batcher._swaps:
        time.sleep(0.001)
    batcher.submit(asked("late", 1), sink=client)
    executor.may_run.set()
    long, late = client.wait("long", "late")
    swapping.join(WAIT_SECONDS)
    assert [float(row["y"]) for row in long.rows] == [2, 4, 6, 8, 10] and long.version == "old"
    assert [float(row["y"]) for row in late.rows] == [3] and late.version == "new"
    assert returned == [2]
    assert batcher.swap(2, label="old") == 3  # where nothing waits it is done at once


def test_a_swap_after_the_end_is_refused(executor, make_batcher):
    batcher = make_batcher()
    batcher.stop(drain_seconds=1)
    with pytest.raises(EngineUnavailable):
        batcher.swap(3)
