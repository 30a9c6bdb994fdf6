"""Counts compiles of one thread.

Owns the listener on jax's compile events. The one decision: a compile while serving is an event that is counted and, in
strict mode, an error; it is told apart by thread, because a process may compile elsewhere with good reason.
"""

import threading
from typing import Any

import jax.monitoring

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts backend compiles on the thread that called `start`."""

    def __init__(self) -> None:
        self.count = 0
        self._thread = 0
        self._listener = self._on_event

    def start(self) -> None:
        """Begin to count this thread's compiles."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listener)

    def stop(self) -> None:
        """Stop counting; `count` stays. Harmless before `start`."""
        if self._thread:
            self._thread = 0
            jax.monitoring.unregister_event_duration_listener(self._listener)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _BACKEND_COMPILE and threading.get_ident() == self._thread:
            self.count += 1
