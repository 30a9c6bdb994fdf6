"""Work that goes on while training computes.

Owns a few threads and the results they owe. Knows nothing of rows or files. The one decision: threads are daemons, so
one that is stuck in a read keeps no process from ending; `concurrent.futures` joins its threads at exit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Background:
    """Runs what is submitted, in order, on `workers` threads that start with the first submission."""

    def __init__(self, *, name: str, workers: int) -> None:
        self._name, self._workers = name, workers
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """The result of `work`, or what it raised, once a thread has done it."""
        owed: Future[ResultT] = Future()
        self._queue.put((owed, work))
        with self._lock:
            if self._started < self._workers:
                self._started += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
        return owed

    def _run(self) -> None:
        while True:
            owed, work = self._queue.get()
            if not owed.set_running_or_notify_cancel():
                continue
            try:
                owed.set_result(work())
            except BaseException as error:
                owed.set_exception(error)
            del owed, work
