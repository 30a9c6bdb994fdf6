"""Runs attempts in threads of the driver.

Owns the second `Backend`: for stages whose place is the driver (the registry's own work), and for tests of the runner
that need no cluster. The one decision: no isolation is promised here; `end` only stops listening.
"""

import threading

from pipeline.cluster.capacity import Capacity, planned_capacity
from pipeline.errors import FailureClass
from pipeline.execution.backend import Failure, WorkOutcome, WorkRequest
from pipeline.execution.worker import execute
from pipeline.stages.protocol import ModelRegistry, Report
from pipeline.stages.reporting import BufferedReporter


class InlineAttempt:
    """One thread."""

    def __init__(self, request: WorkRequest, *, registry: ModelRegistry | None) -> None:
        self._reporter = BufferedReporter()
        self._outcome: WorkOutcome | None = None
        self._request = request
        self._registry = registry
        self._thread = threading.Thread(target=self._run, name=f"stage-{request.stage}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._outcome = execute(self._request, reporter=self._reporter, registry=self._registry, is_own_process=False)

    def drain(self) -> list[Report]:
        """See `Attempt.drain`."""
        return self._reporter.drain()

    def poll(self) -> WorkOutcome | None:
        """See `Attempt.poll`."""
        if self._outcome is None and not self._thread.is_alive():
            message = "the stage's thread ended without an outcome"
            return WorkOutcome(failure=Failure(failure_class=FailureClass.INFRA, error="Thread", message=message))
        return self._outcome

    def state(self) -> str:
        """See `Attempt.state`."""
        return "running"

    def end(self) -> None:
        """See `Attempt.end`; a thread cannot be killed, its result is ignored."""


class InlineBackend:
    """`Backend` without a cluster."""

    def __init__(self, *, registry: ModelRegistry | None = None) -> None:
        self._registry = registry

    def capacity(self) -> Capacity:
        """See `Backend.capacity`: this machine."""
        return planned_capacity()

    def start(self, request: WorkRequest) -> InlineAttempt:
        """See `Backend.start`."""
        return InlineAttempt(request, registry=self._registry)

    def close(self) -> None:
        """See `Backend.close`."""
