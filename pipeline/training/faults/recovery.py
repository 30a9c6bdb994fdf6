"""How long an interruption cost, in parts, and how much work was lost.

Owns the marks that a gang and its executor leave in the workspace, and the arithmetic on them. Knows nothing of how a
gang is started. The one decision: the parts follow each other without a gap, from the last sign of life of the old gang
to the first step that is new, so they add up to the whole; a part nobody measured is left out, never guessed.

| metric | from | to | who marks the end |
| --- | --- | --- | --- |
| rto_detect_seconds | last step of the old gang | somebody knows of the fault | executor |
| rto_teardown_seconds | | no rank is left | executor |
| rto_schedule_seconds | | rank 0 enters training (placement, process start, imports) | rank 0 |
| rto_init_seconds | | process group, model and optimizer stand | rank 0 |
| rto_load_seconds | | the checkpoint is loaded | rank 0 |
| rto_warmup_seconds | | the first step is done | rank 0 |
| rto_replay_seconds | | the first step that the old gang had not done is done | rank 0 |
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from pipeline.artifacts.store import Store
from pipeline.errors import StoreError

_PULSE = "recovery/pulse.json"
_OUTAGE = "recovery/outage.json"
_LOCAL_BEAT_SECONDS = 0.2
_REMOTE_BEAT_SECONDS = 2.0
_SAVES = 8
_LAST_BEAT_SECONDS = 2.0
"""Storage that hangs does not keep a rank from ending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last sign of life of a gang."""

    generation: int
    step: int
    """Steps done."""
    at: float
    """Seconds since the epoch, of the end of that step."""
    started_at: float
    """Seconds since the epoch, of the first step of that gang."""
    saves: tuple[tuple[int, float], ...] = ()
    """Step and time of the states that it last began to save; a commit may be later."""
    ended: bool = False
    """True where training was finished; nothing has to be recovered then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """What the executor saw of the end of a gang; seconds since the epoch."""

    noticed_at: float
    torn_down_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """What the new gang found."""

    pulse: Pulse
    outage: Outage | None


@dataclass(kw_only=True, slots=True)
class Restart:
    """When rank 0 of the new gang was how far; seconds since the epoch."""

    entered_at: float
    ready_at: float = 0.0
    loaded_at: float = 0.0
    first_step_at: float = 0.0
    new_step_at: float = 0.0


def recovery_metrics(lost: Lost, restart: Restart, *, resumed_step: int) -> dict[str, float]:
    """The parts of the recovery time and what was lost.

    Args:
        lost: what the old gang and the executor left.
        restart: marks of the new gang, all of them set.
        resumed_step: step of the commit that was resumed from; 0 where there was none.
    """
    pulse, outage = lost.pulse, lost.outage
    marks = [("init", restart.ready_at), ("load", restart.loaded_at)]
    marks += [("warmup", restart.first_step_at), ("replay", restart.new_step_at)]
    parts: dict[str, float] = {}
    if outage is not None:
        parts = {
            "rto_detect_seconds": outage.noticed_at - pulse.at,
            "rto_teardown_seconds": outage.torn_down_at - outage.noticed_at,
            "rto_schedule_seconds": restart.entered_at - outage.torn_down_at,
        }
    before = restart.entered_at
    for name, at in marks:
        parts[f"rto_{name}_seconds"], before = at - before, at
    parts["rpo_steps"] = float(max(0, pulse.step - resumed_step))
    if parts["rpo_steps"]:
        parts["rpo_seconds"] = pulse.at - dict(pulse.saves).get(resumed_step, pulse.started_at)
    else:
        parts["rpo_seconds"] = 0.0
    return {name: max(0.0, value) for name, value in parts.items()}


def record_outage(store: Store, outage: Outage) -> None:
    """Said by an executor after the old gang is gone and before it starts a new one."""
    store.write(_OUTAGE, json.dumps(asdict(outage)).encode())


def find_lost(store: Store) -> Lost | None:
    """What an earlier gang left unfinished here; None where there was none, it finished, or its mark cannot be read."""
    pulse = _read(store, _PULSE, Pulse)
    if pulse is None or pulse.ended:
        return None
    outage = _read(store, _OUTAGE, Outage)
    is_of_it = outage is not None and outage.noticed_at >= pulse.at
    return Lost(pulse=pulse, outage=outage if is_of_it else None)


MarkT = TypeVar("MarkT", Pulse, Outage)


def _read(store: Store, key: str, kind: type[MarkT]) -> MarkT | None:
    # A mark serves metrics only: one that cannot be read leaves them out, and stops no training.
    with contextlib.suppress(StoreError, ValueError, TypeError, KeyError):
        data = store.read(key)
        if data is None:
            return None
        fields = json.loads(data)
        if "saves" in fields:
            fields["saves"] = tuple((step, at) for step, at in fields["saves"])
        return kind(**fields)
    return None


@dataclass(kw_only=True)
class Heart:
    """Writes the pulse from a thread of its own, so that storage cannot hold a step up."""

    store: Store
    generation: int
    _started_at: float = 0.0
    _saves: tuple[tuple[int, float], ...] = ()
    _pulse: Pulse | None = None
    _written: Pulse | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def beat(self, step: int) -> None:
        """Say that `step` steps are done."""
        now = time.time()
        self._started_at = self._started_at or now
        self._pulse = Pulse(
            generation=self.generation, step=step, at=now, started_at=self._started_at, saves=self._saves
        )

    def saving(self, step: int) -> None:
        """Say that the state of now, of `step` steps, is being saved."""
        self._saves = (*self._saves[1 - _SAVES :], (step, time.time()))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Write while the block runs, and once at its end."""
        thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        thread.start()
        try:
            yield
            if self._pulse is not None:
                self._pulse = replace(self._pulse, ended=True)
        finally:
            self._over.set()
            thread.join(_LAST_BEAT_SECONDS)

    def _run(self) -> None:
        every = _LOCAL_BEAT_SECONDS if self.store.is_local else _REMOTE_BEAT_SECONDS
        while True:
            is_over = self._over.wait(every)
            pulse = self._pulse
            if pulse is not None and pulse is not self._written:
                self._write(pulse)
                self._written = pulse
            if is_over:
                return

    def _write(self, pulse: Pulse) -> None:
        # Storage that is away is told by the next checkpoint; a mark that is missing only leaves a metric out.
        with contextlib.suppress(StoreError):
            self.store.write(_PULSE, json.dumps(asdict(pulse)).encode())
