import threading
import time

import pytest
from sample_run import llm_run

from pipeline.stages.protocol import Report
from pipeline.tracking.delivery import DeliverReports, Delivery, RefusedError, ServerAwayError, StartRun


class FakeWriter:
    """Remembers calls; `away` and `refuse` decide what it does with the next ones."""

    def __init__(self):
        self.calls, self.losses = [], []
        self.away = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self.refuse = lambda call: False

    def write(self, call):
        assert self.hold.wait(10)
        if self.away.is_set():
            raise ServerAwayError("http://ada:secret@tracker is away")
        if self.refuse(call):
            raise RefusedError("no such parameter")
        self.calls.append(call)

    def lost(self, call):
        self.losses.append(call)


def reports(value, *, stage="train"):
    report = Report(kind="metrics", payload={"loss": value}, time=0.0, step=int(value))
    return DeliverReports(run_id="r", stage=stage, attempt=1, reports=(report,))


def delivered_values(writer):
    return [
        report.payload["loss"] for call in writer.calls if isinstance(call, DeliverReports) for report in call.reports
    ]


@pytest.fixture
def writer():
    return FakeWriter()


def test_calls_arrive_in_order_and_reports_of_one_attempt_are_merged(writer):
    delivery = Delivery(lambda: writer)
    writer.hold.clear()
    delivery.put(StartRun(run=llm_run()))
    for value in range(50):
        delivery.put(reports(float(value)))
    delivery.put(reports(50.0, stage="other"))
    writer.hold.set()
    delivery.close(timeout_seconds=5)
    assert delivered_values(writer) == [float(value) for value in range(51)]
    assert len(writer.calls) < 10
    assert delivery.gap == 0


def test_putting_never_waits_for_a_writer_that_hangs(writer):
    delivery = Delivery(lambda: writer, capacity=100)
    writer.hold.clear()
    started = time.perf_counter()
    for value in range(1000):
        delivery.put(reports(float(value), stage=str(value)))
    assert time.perf_counter() - started < 0.5
    assert delivery.gap >= 1000 - 101
    started = time.perf_counter()
    delivery.close(timeout_seconds=0.2)
    assert time.perf_counter() - started < 1.0
    assert delivery.gap == 1000
    writer.hold.set()


def test_a_short_outage_loses_nothing(writer):
    delivery = Delivery(lambda: writer)
    writer.away.set()
    for value in range(5):
        delivery.put(reports(float(value)))
    wait_until(lambda: delivery.gap == 5)
    writer.away.clear()
    assert delivery.flush(timeout_seconds=5)
    assert delivery.gap == 0
    assert delivered_values(writer) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_outage_longer_than_patience_is_counted_and_delivery_resumes(writer):
    delivery = Delivery(lambda: writer, patience_seconds=0.1)
    writer.away.set()
    delivery.put(reports(1.0))
    assert delivery.flush(timeout_seconds=5)
    assert delivery.gap == 1
    assert delivery.last_error == "http://ada:***@tracker is away"
    writer.away.clear()
    delivery.put(reports(2.0))
    delivery.close(timeout_seconds=10)
    assert delivered_values(writer) == [2.0]
    assert delivery.gap == 1
    assert len(writer.losses) == 1


def test_closing_gives_up_soon_on_a_server_that_is_away(writer):
    delivery = Delivery(lambda: writer)
    writer.away.set()
    for value in range(200):
        delivery.put(reports(float(value), stage=str(value)))
    started = time.perf_counter()
    delivery.close(timeout_seconds=30)
    assert time.perf_counter() - started < 5
    assert delivery.gap == 200


def test_a_refused_call_is_counted_once_and_the_next_one_is_delivered(writer):
    delivery = Delivery(lambda: writer)
    writer.refuse = lambda call: call.stage == "bad"
    delivery.put(reports(1.0, stage="bad"))
    delivery.put(reports(2.0))
    delivery.close(timeout_seconds=5)
    assert (delivery.gap, delivered_values(writer)) == (1, [2.0])
    assert delivery.last_error == "no such parameter"


def test_a_defect_of_the_writer_does_not_end_the_thread(writer):
    def broken(call):
        raise KeyError("defect")

    delivery = Delivery(lambda: writer)
    writer.refuse = broken
    delivery.put(reports(1.0))
    delivery.flush(timeout_seconds=5)
    writer.refuse = lambda call: False
    delivery.put(reports(2.0))
    delivery.close(timeout_seconds=5)
    assert (delivery.gap, delivered_values(writer)) == (1, [2.0])


def test_a_writer_that_cannot_be_opened_counts_as_away_until_it_can(writer):
    tries = []

    def open_writer():
        tries.append(1)
        if len(tries) < 3:
            raise ServerAwayError("cannot open")
        return writer

    delivery = Delivery(open_writer)
    delivery.put(reports(1.0))
    delivery.flush(timeout_seconds=10)
    assert delivered_values(writer) == [1.0]
    delivery.close(timeout_seconds=5)


def test_what_opens_a_run_is_never_dropped_for_room(writer):
    delivery = Delivery(lambda: writer, capacity=3)
    writer.hold.clear()
    delivery.put(StartRun(run=llm_run()))
    for value in range(20):
        delivery.put(reports(float(value), stage=str(value)))
    writer.hold.set()
    delivery.close(timeout_seconds=5)
    assert isinstance(writer.calls[0], StartRun)
    assert delivery.gap + len(delivered_values(writer)) == 20


def test_nothing_is_accepted_after_close(writer):
    delivery = Delivery(lambda: writer)
    delivery.close(timeout_seconds=1)
    delivery.put(reports(1.0))
    assert delivery.gap == 1
    delivery.close(timeout_seconds=1)


def wait_until(condition, *, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
