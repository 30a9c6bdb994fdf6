"""Calls to a tracking server, carried by one background thread.

Owns the bounded queue between a run and its tracker, the retries and the count of what was lost. Knows nothing of
MLflow. The one decision: the run never waits. A server that is away keeps calls waiting in the queue; a call that
found it away for longer than `patience_seconds` is lost and counted, and so are the oldest reports when the queue is
full. Calls that open or close a run are never dropped for room, and a writer repairs their order when it is back.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipeline.stages.protocol import Report
from pipeline.tracking.redaction import scrub
from pipeline.tracking.view import RunStatus, RunView, StageView

_LOG = logging.getLogger(__name__)
FIRST_RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 10.0
CLOSING_PATIENCE_SECONDS = 1.0


class ServerAwayError(Exception):
    """The server did not answer; the same call may work later."""


class RefusedError(Exception):
    """The server answered that it will not take the call; another try would change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRun:
    """Open the parent run."""

    run: RunView


@dataclass(frozen=True, kw_only=True, slots=True)
class StartAttempt:
    """Open the child run of an attempt. `parameters` is the flat table."""

    run_id: str
    stage: StageView
    attempt: int
    parameters: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliverReports:
    """What a stage said; `num_calls` counts the calls merged into this one."""

    run_id: str
    stage: str
    attempt: int
    reports: tuple[Report, ...]
    num_calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishAttempt:
    """Close the child run of an attempt."""

    run_id: str
    stage: StageView
    attempt: int
    log_path: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordReuse:
    """A closed child run for a reused stage. `parameters` is the flat table."""

    run_id: str
    stage: StageView
    parameters: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishRun:
    """Close the parent run."""

    run: RunView
    report_path: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconcile:
    """Set the final status of a run whose driver died."""

    run_id: str
    status: RunStatus


Call = StartRun | StartAttempt | DeliverReports | FinishAttempt | RecordReuse | FinishRun | Reconcile


class Writer(Protocol):
    """Carries calls to a server. Used from the delivery thread alone."""

    def write(self, call: Call) -> None:
        """Deliver one call; calling again after a failure must not do anything twice.

        Raises:
            ServerAwayError: the server did not answer.
            RefusedError: the server will not take this call.
        """
        ...

    def lost(self, call: Call) -> None:
        """Learn that `call` was never delivered, so that a later one can repair what it left out."""
        ...


class Delivery:
    """The queue and its thread.

    Args:
        open_writer: makes the writer; called in the thread, because importing and opening one takes seconds. May raise
            as `Writer.write` does, and is called again with the next try.
        capacity: reports kept while the server is slow or away.
        patience_seconds: for how long one call waits for a server that is away.
    """

    def __init__(
        self, open_writer: Callable[[], Writer], *, capacity: int = 10_000, patience_seconds: float = 60.0
    ) -> None:
        self._open_writer = open_writer
        self._capacity = capacity
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._in_flight: Call | None = None
        self._lost = 0
        self._last_error = ""
        self._away = False
        self._closing_at: float | None = None
        self._abandoned = False
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None

    @property
    def gap(self) -> int:
        """Calls lost, and, while the server is away or after `close`, those that still wait."""
        with self._changed:
            waiting = self._away or self._abandoned
            return self._lost + (sum(map(_weight, self._pending())) if waiting else 0)

    @property
    def last_error(self) -> str:
        """Why the last call failed; empty where none did."""
        with self._changed:
            return self._last_error

    def put(self, call: Call) -> None:
        """Queue a call; returns at once."""
        with self._changed:
            if self._abandoned or self._closing_at is not None:
                self._lost += _weight(call)
                return
            if len(self._queue) >= self._capacity and isinstance(call, DeliverReports):
                self._drop_oldest_reports()
            self._queue.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, *, timeout_seconds: float) -> bool:
        """Wait until everything queued is delivered or lost; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending(), timeout=timeout_seconds)

    def close(self, *, timeout_seconds: float) -> None:
        """Deliver what is queued, at most for so long; the rest is lost and counted. May be called again."""
        with self._changed:
            self._closing_at = time.monotonic() + timeout_seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending(), timeout=timeout_seconds)
            self._abandoned = True
            self._changed.notify_all()

    def _pending(self) -> list[Call]:
        return ([self._in_flight] if self._in_flight is not None else []) + list(self._queue)

    def _drop_oldest_reports(self) -> None:
        for index, queued in enumerate(self._queue):
            if isinstance(queued, DeliverReports):
                del self._queue[index]
                self._lost += _weight(queued)
                self._last_error = f"the tracking queue was full ({self._capacity} calls)"
                return

    def _run(self) -> None:
        while (call := self._take()) is not None:
            error = self._deliver(call)
            with self._changed:
                if error is not None:
                    self._lost += _weight(call)
                    self._last_error = error
                if self._away and self._closing_at is not None:
                    self._lost += sum(map(_weight, self._queue))
                    self._queue.clear()
                self._in_flight = None
                self._changed.notify_all()
            if error is not None and self._writer is not None:
                self._writer.lost(call)

    def _take(self) -> Call | None:
        """The next call, with the reports of the same attempt that wait right behind it merged into it."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._abandoned or self._closing_at is not None)
            if self._abandoned or not self._queue:
                return None
            call = self._queue.popleft()
            while isinstance(call, DeliverReports) and self._queue:
                following = self._queue[0]
                if not isinstance(following, DeliverReports) or _attempt_of(following) != _attempt_of(call):
                    break
                self._queue.popleft()
                call = replace(
                    call, reports=call.reports + following.reports, num_calls=call.num_calls + following.num_calls
                )
            self._in_flight = call
            return call

    def _deliver(self, call: Call) -> str | None:
        """Try until it works or patience ends; the reason of the loss, or None."""
        was_away = self._away
        patience = 0.0 if was_away else self._patience_seconds
        if was_away:
            self._pause(LONGEST_RETRY_SECONDS / 2)
        started = time.monotonic()
        delay = FIRST_RETRY_SECONDS
        while True:
            error, retry = self._try(call)
            if error is None:
                self._note_answer()
                return None
            if not retry:
                _LOG.warning("the tracking server refused a call: %s", error)
                return error
            self._note_away(error)
            limit = patience if self._closing_at is None else min(patience, CLOSING_PATIENCE_SECONDS)
            if time.monotonic() - started >= limit or self._abandoned:
                return error
            self._pause(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)

    def _try(self, call: Call) -> tuple[str | None, bool]:
        """The error, if any, and whether another try makes sense."""
        try:
            if self._writer is None:
                self._writer = self._open_writer()
            self._writer.write(call)
        except ServerAwayError as error:
            return scrub(str(error)), True
        except RefusedError as error:
            return scrub(str(error)), False
        except Exception as error:  # the thread's boundary: a defect here must not end a training run
            _LOG.exception("the tracker failed on %s", type(call).__name__)
            return scrub(f"{type(error).__name__}: {error}"), False
        return None, False

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._closing_at is not None, timeout=seconds)
            if self._closing_at is not None and not self._abandoned:
                self._changed.wait_for(lambda: self._abandoned, timeout=min(seconds, FIRST_RETRY_SECONDS))

    def _note_away(self, error: str) -> None:
        with self._changed:
            first, self._away, self._last_error = not self._away, True, error
        if first:
            _LOG.warning("the tracking server is away; the run goes on without it: %s", error)

    def _note_answer(self) -> None:
        with self._changed:
            back, self._away = self._away, False
        if back:
            _LOG.warning("the tracking server is back; %d calls were lost", self._lost)


def _attempt_of(call: DeliverReports) -> Sequence[object]:
    return (call.run_id, call.stage, call.attempt)


def _weight(call: Call) -> int:
    return call.num_calls if isinstance(call, DeliverReports) else 1
