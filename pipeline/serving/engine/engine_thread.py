"""The one thread that owns a device: it warms up, serves, drains, and says what ended it.

Owns that life and what a health check sees of it. Knows nothing of what is computed or asked. The one decision: a
request is only taken between warm-up and draining, and a thread that ends, for whatever reason, first answers
everybody who waits.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.serving.engine.compile_watch import CompileWatch
from pipeline.serving.engine.metrics import Metrics

_LOG = logging.getLogger(__name__)
STALL_SECONDS = 60.0
"""Work waits and no step ends for so long: the engine is unhealthy."""


class EngineUnavailable(Exception):  # noqa: N818 - a state, not a fault of the caller
    """The engine takes no request now: it starts, drains, is full or has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """For health checks."""

    is_ready: bool
    failure: str | None
    num_running: int
    num_waiting: int
    num_compiles_while_serving: int


class WarmUp(Protocol):
    """The executor's `warm_up`."""

    def __call__(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile everything; seconds."""
        ...


class ServingEngine(Protocol):
    """What a replica and its health checks need of an engine, of whatever kind or number."""

    version: str
    """Label of the parameters in use; answers carry it."""

    @property
    def metrics(self) -> Metrics:
        """What it counts."""
        ...

    @property
    def warm_up_seconds(self) -> float:
        """How long it compiled."""
        ...

    def start(self, *, timeout_seconds: float | None = None) -> None:
        """See `EngineThread.start`."""
        ...

    def stop(self, *, drain_seconds: float) -> None:
        """See `EngineThread.stop`."""
        ...

    def status(self) -> EngineStatus:
        """See `EngineThread.status`."""
        ...


class EngineThread(ABC):
    """What the engine and the micro-batcher have in common."""

    def __init__(self, name: str, *, warm_up: WarmUp, num_executables: int, metrics: Metrics, strict: bool) -> None:
        """`name` is for people; `strict` makes a compile after warm-up end the thread."""
        self.metrics = metrics
        self.warm_up_seconds = 0.0
        self.explain: Callable[[Exception], str | None] = _unexplained
        """What is behind an error that ended the thread, where somebody knows better."""
        self.on_end: Callable[[], None] = _nobody_waits
        """Is called last, when everybody is answered."""
        self._name = name
        self._warm_up = warm_up
        self._num_executables = num_executables
        self._strict = strict
        self._wake = threading.Condition()
        self._ready = threading.Event()
        self._is_draining = False
        self._is_stopping = False
        self._failure: str | None = None
        self._last_step_at = time.monotonic()
        self._watch = CompileWatch()
        self._num_compiles_told = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    @abstractmethod
    def _num_running(self) -> int:
        """What is on the device."""

    @property
    @abstractmethod
    def _num_waiting(self) -> int:
        """What is in the queue."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """True while anything waits or runs."""

    @abstractmethod
    def _serve(self) -> None:
        """Work until `_is_stopping`."""

    @abstractmethod
    def _abort_all(self) -> None:
        """Take nothing new, and answer everybody who waits with the failure or the shutdown."""

    def start(self, *, timeout_seconds: float | None = None) -> None:
        """Start the thread and wait until it is warm.

        Raises:
            EngineUnavailable: warm-up failed or took longer than `timeout_seconds`.
        """
        self._thread.start()
        self._ready.wait(timeout_seconds)
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if not self._ready.is_set():
            raise EngineUnavailable(f"the {self._name} is not warm after {timeout_seconds:g} s")

    def fail(self, reason: str) -> None:
        """End the thread after the step it is in, from any thread; everybody who waits is told `reason`."""
        with self._wake:
            self._failure = self._failure or reason
            self._is_stopping = True
            self._wake.notify()

    def stop(self, *, drain_seconds: float) -> None:
        """Take nothing new, let what runs and waits finish for so long, abort the rest, end the thread."""
        with self._wake:
            self._is_draining = True
            self._wake.notify()
        deadline = time.monotonic() + drain_seconds
        while self._is_busy() and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=STALL_SECONDS)

    def status(self) -> EngineStatus:
        """What a health check wants to know."""
        failure = self._failure
        waited = time.monotonic() - self._last_step_at
        if failure is None and self._ready.is_set() and self._is_busy() and waited > STALL_SECONDS:
            failure = f"no step ended for {waited:.0f} s while requests wait"
        return EngineStatus(
            is_ready=self._ready.is_set() and failure is None and not self._is_draining,
            failure=failure,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            num_compiles_while_serving=self._watch.count,
        )

    def _check_is_open(self) -> None:
        """Before a request is queued; the caller holds `_wake`.

        Raises:
            EngineUnavailable: it starts, drains or has failed.
        """
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self._is_draining or not self._ready.is_set():
            raise EngineUnavailable("the server is starting or shutting down")
        if not self._is_busy():
            self._last_step_at = time.monotonic()  # idle time is no stall, and the thread has yet to wake

    def _run(self) -> None:
        try:
            self.warm_up_seconds = self._warm_up(
                on_progress=lambda done, total: _LOG.info("compiled %d of %d", done, total)
            )
            self.metrics.count("compile_events_total", self._num_executables, label="warmup")
            self._watch.start()
            self._ready.set()
            self._serve()
        except Exception as error:  # the thread's boundary: whatever it is, requests must not hang
            _LOG.exception("the %s failed", self._name)
            reason = self.explain(error) or f"the {self._name} failed: {type(error).__name__}: {error}"
            self._failure = self._failure or reason
        finally:
            self._abort_all()
            self.on_end()
            self._ready.set()
            self._watch.stop()

    def _publish_load(self) -> None:
        self.metrics.gauge("num_requests_running", self._num_running)
        self.metrics.gauge("num_requests_waiting", self._num_waiting)

    def _check_compiles(self) -> None:
        new = self._watch.count - self._num_compiles_told
        if new > 0:
            self._num_compiles_told += new
            self.metrics.count("compile_events_total", new, label="serving")
            _LOG.error("%d compiles while serving; a shape is missing from warm-up", new)
            if self._strict:
                raise RuntimeError(f"{new} compiles after warm-up")


def _unexplained(error: Exception) -> str | None:
    return None


def _nobody_waits() -> None:
    """Most engines are alone."""
