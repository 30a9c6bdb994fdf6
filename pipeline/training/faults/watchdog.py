"""A second pair of eyes on a rank: is there progress, and what is it waiting for?

Owns the thread that ends a process without progress, and its last words. Knows nothing of what a step does: the loop
says what it waits for. The one decision: where the limit has passed, the process writes the stacks of all threads and
ends itself, because nothing inside it can be trusted to come back; the executor sees the end, and the words name the
rank, the step and the wait.

A thread cannot run while another one keeps the interpreter's lock, so the watchdog sets a timer of faulthandler's,
which needs no lock, for the case that it is not heard itself.
"""

import contextlib
import faulthandler
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.errors import PipelineError, PreemptedError
from pipeline.training.failure import StalledError, WaitingError
from pipeline.training.faults.last_words import end_process
from pipeline.training.faults.requests import Flag, preempted_for_seconds, reason_of

SLOW_STEPS = 5.0
"""A step may take so many times the median one, where that is longer than the limit of the flow."""
_LOOKS_A_LIMIT = 20
_LONGEST_LOOK_SECONDS = 1.0
_UNHEARD = 2.0
"""The timer without a lock fires after so many limits."""
_MEDIAN_OF = 101
_OWN_WORK = ("data",)
"""Where a rank waits for nobody else."""
_STACK_CHARACTERS = 12_000
_STDERR = 2
"""Its file descriptor; `sys.stderr` may have been replaced by something that has none."""


@dataclass(kw_only=True)
class Watchdog:
    """Watches one rank while `watching()`; without it, every method only notes."""

    rank: int
    step_timeout_seconds: float
    start_timeout_seconds: float
    grace_seconds: float
    end: Callable[[PipelineError], None] = end_process
    _waits_for: str = "start"
    _detail: Callable[[], str | None] = lambda: None
    _own_limit: tuple[str, float] = ("", 0.0)
    _step: int = 0
    _progress_at: float = field(default_factory=time.monotonic)
    _is_started: bool = False
    _thread: int = field(default_factory=threading.get_ident)
    """That which is watched."""
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))

    def waits_for(
        self,
        what: str,
        *,
        step: int | None = None,
        detail: Callable[[], str | None] = lambda: None,
        own_limit: tuple[str, float] = ("", 0.0),
    ) -> None:
        """Say what comes next: `data`, `forward and backward`, `the other ranks`, `a checkpoint`, ...

        Args:
            what: in words.
            step: from 0, where a new one begins.
            detail: asked only where there is no progress: which part of it, in words.
            own_limit: name and seconds of a deadline of its own, which this may take where it is the longer one.
        """
        self._waits_for, self._detail, self._own_limit = what, detail, own_limit
        if step is not None:
            self._step = step

    def progress(self) -> None:
        """Something was finished that is no step: a pass of a validation, a save."""
        self._progress_at = time.monotonic()

    def step_done(self) -> None:
        """A step was finished; its duration moves the limit."""
        now = time.monotonic()
        if self._is_started:
            self._durations.append(now - self._progress_at)
        self._is_started, self._progress_at = True, now

    @property
    def limit_seconds(self) -> float:
        """How long there may be no progress now."""
        return max(self._step_limit_seconds, self._own_limit[1])

    @property
    def _step_limit_seconds(self) -> float:
        if not self._is_started:
            return max(self.start_timeout_seconds, self.step_timeout_seconds)
        slow = SLOW_STEPS * statistics.median(self._durations) if self._durations else 0.0
        return max(self.step_timeout_seconds, slow)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block is left."""
        self._progress_at, self._thread = time.monotonic(), threading.get_ident()
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def problem(self) -> PipelineError | None:
        """Why the process has to end now, or None."""
        asked_for = preempted_for_seconds()
        detail = self._detail()
        where = f"rank {self.rank}, step {self._step + 1}, waiting for {self._waits_for}"
        where += f" ({detail})" if detail else ""
        if asked_for is not None and asked_for > self.grace_seconds:
            return PreemptedError(
                f"{where}: {reason_of(Flag.PREEMPT)} asked training to make way, and no checkpoint was committed "
                f"within grace_seconds: {self.grace_seconds:g}; training resumes from the one before",
                hint="raise `preemption.grace_seconds` if the machine gives more time, or make steps and saves shorter",
            )
        idle, limit = time.monotonic() - self._progress_at, self.limit_seconds
        if idle <= limit:
            return None
        name = "faults.step_timeout_seconds" if self._is_started else "faults.start_timeout_seconds"
        name = self._own_limit[0] if limit > self._step_limit_seconds else name
        kind = StalledError if self._waits_for in _OWN_WORK else WaitingError
        return kind(
            f"{where}: no progress for {idle:.1f} s (limit {limit:g} s)\n{_stacks(first=self._thread)}",
            hint=f"if this is no fault but slow work, raise `{name}`",
        )

    def _watch(self, over: threading.Event) -> None:
        look = min(_LONGEST_LOOK_SECONDS, min(self.limit_seconds, self.grace_seconds) / _LOOKS_A_LIMIT)
        armed_at = -float("inf")
        while not over.wait(look):
            now, unheard = time.monotonic(), _UNHEARD * self.limit_seconds
            if now - armed_at > unheard / _LOOKS_A_LIMIT:
                faulthandler.dump_traceback_later(unheard, exit=True, file=_STDERR)
                armed_at = now
            error = self.problem()
            if error is not None:
                self.end(error)
                return


def _stacks(*, first: int) -> str:
    """What every thread of this process is doing; that of the thread `first` before the others, whatever is cut off.

    It is asked for by itself: faulthandler shows a hundred threads, and the oldest are not among them.
    """
    name = f"Thread 0x{first:016x}"
    frame = sys._current_frames().get(first)
    own = [] if frame is None else traceback.extract_stack(frame)
    lines = [f'  File "{place.filename}", line {place.lineno} in {place.name}' for place in reversed(own)]
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        others = [text for text in file.read().split("\n\n") if name not in text]
    return "\n\n".join(["\n".join([f"{name} (most recent call first):", *lines]), *others])[:_STACK_CHARACTERS]
