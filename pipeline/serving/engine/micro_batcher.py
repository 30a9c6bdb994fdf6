"""The micro-batcher: one thread that owns the device and runs rows of several requests together.

Owns the queue, what runs next, and what fails with what. Knows nothing of HTTP, of jax or of what a row means. The one
decision: a row waits at most `wait_seconds` for company, and only where the device is free; while a batch runs, the
next one gathers by itself. A batch that fails is run again request by request, so a request's failure is its own;
after several failures in a row the device is taken to be broken, and the batcher ends and says so.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.serving.engine.batch_request import Arrays, BatchAnswer, BatchRequest, Row, Sink
from pipeline.serving.engine.engine_thread import STALL_SECONDS, EngineThread, EngineUnavailable
from pipeline.serving.engine.metrics import Metrics

_LOG = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 3
"""Requests that failed alone, without a success between them."""


class BatchExecutor(Protocol):
    """What the batcher needs of the device."""

    @property
    def num_executables(self) -> int:
        """How many shapes are compiled at warm-up."""
        ...

    def warm_up(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile everything; seconds."""
        ...

    def bucket(self, length: int) -> int:
        """The length to which a row of this length is padded."""
        ...

    def run(self, rows: Sequence[Row]) -> list[Arrays]:
        """One forward pass; the outputs of each row."""
        ...

    def place(self, leaves: Any) -> Any:
        """New parameters beside those in use; for any thread."""
        ...

    def exchange(self, placed: Any) -> Any:
        """Use them from the next pass on; returns those in use until now."""
        ...

    def on_host(self, state: Any) -> Any:
        """What `exchange` returned, as `place` takes it; for any thread."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """What one replica takes."""

    max_batch_rows: int
    wait_seconds: float
    """A lone row waits so long for others."""
    max_waiting_rows: int = 4096


@dataclass(kw_only=True, slots=True)
class _Job:
    request: BatchRequest
    sink: Sink
    arrived_at: float
    results: list[Arrays | None]
    has_started: bool = False
    num_done: int = 0
    is_cancelled: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """One row of a job."""

    job: _Job
    index: int

    @property
    def row(self) -> Row:
        return self.job.request.rows[self.index]


@dataclass(frozen=True, slots=True)
class _Swap:
    placed: Any
    label: str
    done: "Future[Any]"


@dataclass(kw_only=True, slots=True)
class _Queue:
    """Rows that wait, in order of arrival."""

    items: deque[_Item] = field(default_factory=deque)
    jobs: dict[str, _Job] = field(default_factory=dict)

    def take(self, *, max_rows: int, bucket: Callable[[int], int], only_started: bool = False) -> list[_Item]:
        """The oldest row, and those behind it that fit into its padded length; of requests that began, if asked."""
        limit: int | None = None
        taken: list[_Item] = []
        passed: list[_Item] = []
        while self.items and len(taken) < max_rows:
            item = self.items.popleft()
            if item.job.is_cancelled:
                continue
            is_next = item.job.has_started or not only_started
            if is_next and limit is None:
                limit = bucket(item.row.length)
            (taken if is_next and limit is not None and item.row.length <= limit else passed).append(item)
        self.items.extendleft(reversed(passed))
        return taken


class MicroBatcher(EngineThread):
    """Dynamic batching over one executor."""

    def __init__(self, executor: BatchExecutor, *, limits: BatchLimits, metrics: Metrics, strict: bool = False) -> None:
        """`strict` makes a compile after warm-up end the batcher."""
        super().__init__(
            "micro-batcher",
            warm_up=executor.warm_up,
            num_executables=executor.num_executables,
            metrics=metrics,
            strict=strict,
        )
        self.limits = limits
        self.version = ""
        """Label of the parameters in use; answers carry it."""
        self._executor = executor
        self._swaps: deque[_Swap] = deque()
        self._queue = _Queue()
        self._batch: list[_Item] = []
        self._num_failures = 0

    def submit(self, request: BatchRequest, *, sink: Sink) -> None:
        """Queue a request; `sink` gets its answer once.

        Raises:
            EngineUnavailable: it starts, drains, is full or has failed.
        """
        with self._wake:
            self._check_is_open()
            if len(self._queue.items) + len(request.rows) > self.limits.max_waiting_rows:
                raise EngineUnavailable(f"{len(self._queue.items)} of {self.limits.max_waiting_rows} rows wait already")
            job = _Job(request=request, sink=sink, arrived_at=time.monotonic(), results=[None] * len(request.rows))
            self._queue.jobs[request.request_id] = job
            self._queue.items.extend(_Item(job=job, index=index) for index in range(len(request.rows)))
            self._wake.notify()

    def swap(self, leaves: Any, *, label: str = "") -> Any:
        """Exchange the parameters between two batches; returns the old ones in the host's memory.

        Requests whose rows have begun end with the old ones; others wait for the new ones.

        Raises:
            ParameterError: a name, shape or dtype differs; the old ones stay.
            EngineUnavailable: it starts, drains or has failed.
        """
        swap = _Swap(self._executor.place(leaves), label, Future())
        with self._wake:
            self._check_is_open()
            self._swaps.append(swap)
            self._wake.notify()
        try:
            before = swap.done.result(timeout=STALL_SECONDS)
        except TimeoutError as error:
            if swap.done.cancel():
                raise EngineUnavailable("no batch ended while new parameters waited; the old ones stay") from error
            before = swap.done.result()  # it was just begun
        return self._executor.on_host(before)

    def cancel(self, request_id: str) -> None:
        """Rows that have not started never run; harmless where the request is unknown or finished."""
        with self._wake:
            job = self._queue.jobs.pop(request_id, None)
            if job is not None:
                job.is_cancelled = True
                self.metrics.count("aborted_requests_total", label="client")

    @property
    def _num_running(self) -> int:
        return len(self._batch)

    @property
    def _num_waiting(self) -> int:
        return len(self._queue.items)

    def _is_busy(self) -> bool:
        return bool(self._queue.items or self._batch or self._swaps)

    def _serve(self) -> None:
        while (batch := self._gather()) is not None:
            self._work(batch)

    def _gather(self) -> list[_Item] | None:
        """The next batch, after its wait for company; None at the end."""
        limits = self.limits
        with self._wake:
            while not (self._queue.items or self._swaps or self._is_stopping):
                self._publish_load()
                self._wake.wait()
            if not self._is_stopping:
                self._last_step_at = time.monotonic()  # idle time is no stall
                self._wait_for_company()
            if self._is_stopping:
                return None
            take = functools.partial(self._queue.take, max_rows=limits.max_batch_rows, bucket=self._executor.bucket)
            self._batch = take(only_started=bool(self._swaps))
            if self._swaps and not self._batch:
                self._exchange()
                self._batch = take()
            self._publish_load()
        return self._batch

    def _wait_for_company(self) -> None:
        # From the arrival of the oldest: a row that already waited for the batch before runs at once.
        limits = self.limits
        while 0 < len(self._queue.items) < limits.max_batch_rows:
            left = self._queue.items[0].job.arrived_at + limits.wait_seconds - time.monotonic()
            if left <= 0 or self._swaps or self._is_draining or self._is_stopping:
                break
            self._wake.wait(left)

    def _exchange(self) -> None:
        while self._swaps:
            swap = self._swaps.popleft()
            if not swap.done.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            before = self._executor.exchange(swap.placed)
            self.version = swap.label
            swap.done.set_result(before)

    def _work(self, batch: list[_Item]) -> None:
        if batch:
            now = time.monotonic()
            for job in _jobs(batch):
                if not job.has_started:
                    job.has_started = True
                    self.metrics.observe("request_queue_time_seconds", now - job.arrived_at)
            self._execute(batch)
        self._batch = []
        self._last_step_at = time.monotonic()
        self._check_compiles()

    def _execute(self, batch: list[_Item]) -> None:
        try:
            self._run_rows(batch)
        except Exception:  # a batch's own boundary: its requests are tried alone
            jobs = _jobs(batch)
            _LOG.exception("a batch of %d rows of %d requests failed", len(batch), len(jobs))
            for job in jobs:
                self._execute_alone(job, [item for item in batch if item.job is job])

    def _execute_alone(self, job: _Job, batch: list[_Item]) -> None:
        try:
            self._run_rows(batch)
        except Exception as error:  # a request's own boundary: it fails alone
            self._finish(job, error=f"{type(error).__name__}: {error}")
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise RuntimeError(f"{self._num_failures} requests in a row failed; the last: {error}") from error

    def _run_rows(self, batch: list[_Item]) -> None:
        outputs = self._executor.run([item.row for item in batch])
        self._num_failures = 0
        self.metrics.count("batches_total")
        self.metrics.count("rows_total", len(batch))
        for item, output in zip(batch, outputs, strict=True):
            item.job.results[item.index] = output
            item.job.num_done += 1
        for job in _jobs(batch):
            if job.num_done == len(job.results):
                self._finish(job)

    def _finish(self, job: _Job, *, error: str = "") -> None:
        """The one place where a request leaves."""
        with self._wake:
            known = self._queue.jobs.pop(job.request.request_id, None)
            if error:
                job.is_cancelled = True  # rows of it that wait do not run
        if known is None:
            return
        if error:
            answer = BatchAnswer(request_id=job.request.request_id, error=error)
            self.metrics.count("aborted_requests_total", label="error")
        else:
            rows = [row for row in job.results if row is not None]
            answer = BatchAnswer(request_id=job.request.request_id, rows=rows, version=self.version)
            self.metrics.count("request_success_total", label="stop")
            self.metrics.observe("e2e_request_latency_seconds", time.monotonic() - job.arrived_at)
        try:
            job.sink(answer)
        except Exception:  # a reader that is gone must not end the others
            _LOG.exception("the reader of request %s failed", job.request.request_id)

    def _abort_all(self) -> None:
        with self._wake:
            self._is_draining = True
            jobs = list(self._queue.jobs.values())
        while self._swaps:
            done = self._swaps.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineUnavailable(self._failure or "the server shut down"))
        for job in jobs:
            self._finish(job, error=self._failure or "the server shut down")


def _jobs(batch: Sequence[_Item]) -> list[_Job]:
    """Each request of the batch once, in order."""
    return list({id(item.job): item.job for item in batch}.values())
