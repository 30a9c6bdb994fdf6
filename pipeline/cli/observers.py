"""How a run looks while it runs: a live table on a terminal, plain lines in a pipe, JSON lines with `--json`.

Owns the three `Observer`s. The one decision: all three show the same facts; none invents an estimate that the stage
did not report (time left is derived from reported progress alone).
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pipeline.cli.text import duration, make_console, make_table, number, styled
from pipeline.execution.observer import Observer
from pipeline.stages.protocol import Report
from pipeline.tracking.view import RunView, StageStatus, StageView

PLAIN_SECONDS = 5.0
"""Between two progress lines of one stage in a pipe."""


@dataclass(kw_only=True)
class Progress:
    """What is known of how far a stage is."""

    started_at: float
    first_done: float | None = None
    first_at: float = 0.0
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def take(self, report: Report) -> None:
        """Take in a report."""
        if report.kind == "progress":
            self.done, self.total = float(report.payload["done"]), report.payload["total"]
            self.unit, self.note = report.payload["unit"], report.payload["note"]
            if self.first_done is None:
                self.first_done, self.first_at = self.done, report.time
        elif report.kind == "metrics":
            self.metrics.update(report.payload)
        elif report.kind == "note":
            self.note = report.payload["text"]

    def seconds_left(self, *, now: float) -> float | None:
        """By the pace since the first progress report."""
        if self.total is None or self.first_done is None or self.done <= self.first_done:
            return None
        pace = (now - self.first_at) / (self.done - self.first_done)
        return max(0.0, (float(self.total) - self.done) * pace)

    def describe(self, *, now: float) -> str:
        """`45/150 steps, loss 6.21, 2,310 tokens/s, 1 min 12 s left`."""
        parts = []
        if self.total is not None:
            parts.append(f"{number(self.done)}/{number(float(self.total))} {self.unit}")
        if self.note:
            parts.append(self.note)
        left = self.seconds_left(now=now)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


class _Tracked:
    """The state both readable observers keep."""

    def __init__(self) -> None:
        self.stages: dict[str, StageView] = {}
        self.progress: dict[str, Progress] = {}
        self.reasons: dict[str, str] = {}

    def change(self, stage: StageView) -> None:
        previous = self.stages.get(stage.name)
        self.stages[stage.name] = stage
        if previous is None or len(previous.attempts) != len(stage.attempts):
            self.progress[stage.name] = Progress(started_at=time.time())
            self.reasons.pop(stage.name, None)


class LiveObserver:
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = _Tracked()
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=False)

    def run_started(self, run: RunView) -> None:
        """See `Observer`."""
        self._console.print(f"run [bold]{run.run_id}[/] of flow [bold]{escape(run.flow)}[/]")
        self._live.start()

    def stage_changed(self, stage: StageView) -> None:
        """See `Observer`."""
        self._state.change(stage)

    def reported(self, stage: str, report: Report) -> None:
        """See `Observer`."""
        self._state.progress[stage].take(report)

    def waiting(self, stage: str, reason: str) -> None:
        """See `Observer`."""
        self._state.reasons[stage] = reason

    def run_finished(self, run: RunView) -> None:
        """See `Observer`."""
        self._live.stop()

    def close(self) -> None:
        """Give the terminal back, whatever happened."""
        self._live.stop()

    def _table(self) -> Table:
        now = time.time()
        table = make_table(expand=True)
        names = [len(name) for name in self._state.stages]
        for title, width in (("stage", max(names, default=5)), ("status", 11), ("attempt", 7), ("time", 12)):
            table.add_column(title, no_wrap=True, width=width)
        table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)  # takes what a narrow terminal leaves
        for stage in self._state.stages.values():
            table.add_row(
                escape(stage.name),
                styled(stage.status),
                str(stage.attempts[-1].attempt) if stage.attempts else "",
                duration((stage.ended_at or now) - stage.started_at) if stage.started_at else "",
                escape(self._detail(stage, now=now)),
            )
        return table

    def _detail(self, stage: StageView, *, now: float) -> str:
        progress = self._state.progress[stage.name]
        if stage.status is StageStatus.RUNNING:
            return progress.describe(now=now) or self._state.reasons.get(stage.name, "starting")
        if stage.status is StageStatus.WAITING:
            return self._state.reasons.get(stage.name, stage.reason)
        return ending(stage)


class PlainObserver:
    """One line for each thing that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = _Tracked()
        self._said_at: dict[str, float] = {}
        self._said_reason: dict[str, str] = {}

    def run_started(self, run: RunView) -> None:
        """See `Observer`."""
        self._say(f"run {run.run_id} of flow {run.flow}")

    def stage_changed(self, stage: StageView) -> None:
        """See `Observer`."""
        previous = self._state.stages.get(stage.name)
        self._state.change(stage)
        is_same = previous is not None and previous.status is stage.status and previous.gates == stage.gates
        if not is_same:
            tail = stage.reason if stage.status in (StageStatus.RUNNING, StageStatus.WAITING) else ending(stage)
            self._say(f"{stage.name}: {stage.status.value} {tail}".rstrip())

    def reported(self, stage: str, report: Report) -> None:
        """See `Observer`."""
        now = time.time()
        self._state.progress[stage].take(report)
        if report.kind == "note":
            self._say(f"{stage}: {report.payload['text']}")
        elif report.kind == "progress" and now - self._said_at.get(stage, 0.0) >= PLAIN_SECONDS:
            self._said_at[stage] = now
            self._say(f"{stage}: {self._state.progress[stage].describe(now=now)}")

    def waiting(self, stage: str, reason: str) -> None:
        """See `Observer`."""
        if self._said_reason.get(stage) != reason:
            self._said_reason[stage] = reason
            self._say(f"{stage}: {reason}")

    def run_finished(self, run: RunView) -> None:
        """See `Observer`."""

    def close(self) -> None:
        """Nothing to give back."""

    def _say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {escape(text)}")


class JsonObserver:
    """One JSON object a line on standard output."""

    def run_started(self, run: RunView) -> None:
        """See `Observer`."""
        self._write("run-started", {"run_id": run.run_id, "flow": run.flow})

    def stage_changed(self, stage: StageView) -> None:
        """See `Observer`."""
        self._write("stage", asdict(stage))

    def reported(self, stage: str, report: Report) -> None:
        """See `Observer`."""
        self._write("report", {"stage": stage, **asdict(report)})

    def waiting(self, stage: str, reason: str) -> None:
        """See `Observer`: waits repeat many times a second and carry no news for a program."""

    def run_finished(self, run: RunView) -> None:
        """See `Observer`."""
        summary = {"run_id": run.run_id, "status": run.status, "error": run.error, "tracking_gap": run.tracking_gap}
        self._write("run-finished", summary)

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, event: str, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"event": event, "time": time.time(), **value}, default=str) + "\n")
        sys.stdout.flush()


class ClosableObserver(Observer, Protocol):
    """An observer of the command line: it must be closed."""

    def close(self) -> None:
        """Give back what it holds."""
        ...


def ending(stage: StageView) -> str:
    """What matters of a stage that has ended (or has not begun): why, the main metrics, the verdicts."""
    parts = []
    if stage.status in (StageStatus.REUSED, StageStatus.SKIPPED, StageStatus.FAILED, StageStatus.PENDING):
        parts.append(stage.reason)
    if stage.status in (StageStatus.DONE, StageStatus.REUSED):
        parts.extend(f"{name} {number(value)}" for name, value in list(stage.metrics.items())[:4])
    parts.extend(str(verdict) for verdict in stage.gates if stage.status is not StageStatus.FAILED)
    return ", ".join(part for part in parts if part)


def make_observer(*, as_json: bool) -> ClosableObserver:
    """The observer that fits the output."""
    if as_json:
        return JsonObserver()
    console = make_console()
    return LiveObserver(console) if console.is_terminal else PlainObserver(console)
