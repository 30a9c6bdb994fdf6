"""Several engines, each with a copy of the model on devices of its own, behind one.

Owns which engine gets a request, and their life as one. Knows nothing of devices. The one decision: the `data` axis of
a mesh is engines that know nothing of each other, so a prompt that one of them reads never holds up the tokens of the
others, and each is exactly what is proven for one.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pipeline.serving.engine.completion_text import Sink
from pipeline.serving.engine.engine import SWAP_WAIT_SECONDS, Engine, Swapped
from pipeline.serving.engine.engine_thread import EngineStatus, ServingEngine
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import Request
from pipeline.serving.engine.scheduler import Limits

_Result = TypeVar("_Result")
_SHARES = ("kv_cache_usage_perc",)
"""Gauges of which the mean is meant, not the sum."""


class TextEngine(ServingEngine, Protocol):
    """What HTTP needs of an engine that completes text, or of several."""

    @property
    def limits(self) -> Limits:
        """Of all engines together."""
        ...

    def submit(self, request: Request, *, sink: Sink) -> None:
        """See `Engine.submit`."""
        ...

    def cancel(self, request_id: str, *, reason: str = "client") -> None:
        """See `Engine.cancel`."""
        ...


class SharedMetrics(Metrics):
    """What one engine of several writes to: counters and histograms are common, of a gauge it has its part."""

    def __init__(
        self, common: Metrics, *, parts: dict[tuple[str, int], float], lock: threading.Lock, index: int, size: int
    ) -> None:
        super().__init__(model=common.model, names=())
        self._common, self._parts, self._index, self._size = common, parts, index, size
        self._parts_lock = lock

    def count(self, name: str, amount: float = 1.0, *, label: str = "") -> None:
        """Add to the common counter."""
        self._common.count(name, amount, label=label)

    def observe(self, name: str, seconds: float, *, times: int = 1) -> None:
        """Add to the common histogram."""
        self._common.observe(name, seconds, times=times)

    def gauge(self, name: str, value: float) -> None:
        """Set this engine's part; the common gauge is the sum, or the mean where it is a share."""
        with self._parts_lock:  # or an older sum could be set last, and stay while the engines are idle
            self._parts[name, self._index] = value
            total = sum(self._parts.get((name, index), 0.0) for index in range(self._size))
            self._common.gauge(name, total / self._size if name in _SHARES else total)


def shared_metrics(common: Metrics, *, size: int) -> list[SharedMetrics]:
    """One for each engine."""
    parts: dict[tuple[str, int], float] = {}
    lock = threading.Lock()
    return [SharedMetrics(common, parts=parts, lock=lock, index=index, size=size) for index in range(size)]


class EngineGroup:
    """Engines behind one; a request goes to the one with the fewest."""

    def __init__(self, engines: Sequence[Engine], *, metrics: Metrics) -> None:
        """`metrics` is what the engines' own ones are parts of."""
        self.metrics = metrics
        self._engines = tuple(engines)
        self._turn = itertools.cycle(range(len(engines)))

    @property
    def version(self) -> str:
        """Label of the parameters in use."""
        return self._engines[0].version

    @version.setter
    def version(self, label: str) -> None:
        for engine in self._engines:
            engine.version = label

    @property
    def warm_up_seconds(self) -> float:
        """Of the slowest."""
        return max(engine.warm_up_seconds for engine in self._engines)

    @property
    def limits(self) -> Limits:
        """Of all together."""
        first = self._engines[0].limits
        return replace(first, slots=first.slots * len(self._engines))

    def submit(self, request: Request, *, sink: Sink) -> None:
        """Give the request to the engine with the fewest; in turn where they have as many.

        Raises:
            EngineUnavailable: it starts, drains, is full or has failed.
        """
        first = next(self._turn)
        ordered = self._engines[first:] + self._engines[:first]
        min(ordered, key=_load).submit(request, sink=sink)

    def cancel(self, request_id: str, *, reason: str = "client") -> None:
        """End a request wherever it is."""
        for engine in self._engines:
            engine.cancel(request_id, reason=reason)

    def start(self, *, timeout_seconds: float | None = None) -> None:
        """Start all; returns when every one is warm.

        Raises:
            EngineUnavailable: a warm-up failed or took longer than `timeout_seconds`.
        """
        self._each(lambda engine: engine.start(timeout_seconds=timeout_seconds))

    def stop(self, *, drain_seconds: float) -> None:
        """Drain and end all at the same time."""
        self._each(lambda engine: engine.stop(drain_seconds=drain_seconds))

    def status(self) -> EngineStatus:
        """Ready when every one is; failed when any has."""
        found = [engine.status() for engine in self._engines]
        return EngineStatus(
            is_ready=all(status.is_ready for status in found),
            failure=next((status.failure for status in found if status.failure is not None), None),
            num_running=sum(status.num_running for status in found),
            num_waiting=sum(status.num_waiting for status in found),
            num_compiles_while_serving=sum(status.num_compiles_while_serving for status in found),
        )

    def swap(self, leaves: Mapping[str, Any], *, label: str = "", wait_seconds: float = SWAP_WAIT_SECONDS) -> Swapped:
        """Exchange the parameters of every engine; see `Engine.swap`."""
        done = self._each(lambda engine: engine.swap(leaves, label=label, wait_seconds=wait_seconds))
        return Swapped(
            leaves=done[0].leaves,
            num_cut_over=sum(swapped.num_cut_over for swapped in done),
            waited_seconds=max(swapped.waited_seconds for swapped in done),
        )

    def _each(self, work: Callable[[Engine], _Result]) -> list[_Result]:
        with ThreadPoolExecutor(max_workers=len(self._engines)) as pool:
            return list(pool.map(work, self._engines))


def _load(engine: Engine) -> int:
    status = engine.status()
    return status.num_running + status.num_waiting
