"""How far a verb is: a bar on a terminal, plain lines in a pipe, on standard error.

Owns both forms. The one decision: progress never mixes with results, so a program can always read standard output.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.cli.text import make_console

PLAIN_SECONDS = 5.0
"""Between two lines in a pipe; what takes less is not told."""

Told = Callable[..., None]
"""Called with done, total, and perhaps what was done."""


@contextmanager
def following(unit: str, *, quiet: bool = False) -> Iterator[Told]:
    """What to call with (done, total) or (done, total, what) inside the block; `quiet` says nothing."""
    console = make_console(stderr=True)
    if quiet:
        yield lambda done, total, what="": None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(unit, total=None)
            yield lambda done, total, what="": bar.update(task, completed=done, total=total, description=what or unit)
    else:
        yield _Lines(console, unit=unit).tell


class _Lines:
    """A line now and then."""

    def __init__(self, console: Console, *, unit: str) -> None:
        self._console, self._unit, self._said_at = console, unit, time.monotonic()

    def tell(self, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        if now - self._said_at >= PLAIN_SECONDS:
            self._said_at = now
            self._console.print(f"{done}/{total} {what or self._unit}", markup=False)
