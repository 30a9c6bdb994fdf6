"""The actor that is one stage attempt's process.

Owns nothing but the way between Ray and `worker.execute`. The one decision: one actor per attempt, never reused, so
that every stage starts in a fresh process; its resources are freed when it ends.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.store import open_store
from pipeline.execution.backend import WorkOutcome, WorkRequest
from pipeline.execution.worker import execute
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter


class StageWorker:
    """Runs one attempt; other methods are answered meanwhile (the actor is threaded)."""

    def __init__(self) -> None:
        self._reporter = BufferedReporter()

    def run(self, request: WorkRequest) -> WorkOutcome:
        """Run the attempt; what the process prints is kept as the attempt's log."""
        store = open_store(request.store_url)
        log_path = _log_path(request)
        _redirect_output(log_path)
        outcome = execute(request, reporter=self._reporter, is_own_process=True)
        if outcome.failure is not None:
            sys.stderr.write(outcome.failure.traceback + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
        if not store.is_local:
            store.write(request.log_key, log_path.read_bytes())
        return outcome

    def drain(self) -> list[Report]:
        """Reports since the last call."""
        return self._reporter.drain()

    def push_reports(self, reports: Sequence[Report]) -> None:
        """Reports of other processes of this attempt (training ranks)."""
        self._reporter.push(reports)

    def process_id(self) -> int:
        """Answered once the actor runs."""
        return os.getpid()


def _log_path(request: WorkRequest) -> Path:
    store = open_store(request.store_url)
    if store.is_local:
        path = store.local_path(request.log_key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
    return Path(tempfile.mkdtemp(prefix="pipeline-log-")) / "output.log"


def _redirect_output(path: Path) -> None:
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
