"""What stands beside a rank while it trains.

Owns the agreement word, the watchdog, the counts of skipped steps and the recovery marks of one rank, and what of them
a checkpoint keeps. Knows nothing of models or steps. The one decision: the loop tells the guard what it does, and asks
it what the ranks want; none of it reaches into the loop.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.artifacts.store import Store
from pipeline.errors import ClusterError
from pipeline.training.fault_policy import FaultPolicy, Preemption
from pipeline.training.faults import failpoints
from pipeline.training.faults.agreement import Agreement
from pipeline.training.faults.non_finite import NonFiniteSteps
from pipeline.training.faults.recovery import Heart, Lost, Restart, find_lost, recovery_metrics
from pipeline.training.faults.requests import Flag, asked
from pipeline.training.faults.watchdog import Watchdog
from pipeline.training.worker import WorkerContext

GUARD_EXTRA = "faults"
"""Name in a checkpoint."""


def make_watchdog(worker: WorkerContext, *, faults: FaultPolicy, preemption: Preemption) -> Watchdog:
    """The watchdog of a rank; it watches from before the process group is there."""
    return Watchdog(
        rank=worker.rank,
        step_timeout_seconds=faults.step_timeout_seconds,
        start_timeout_seconds=faults.start_timeout_seconds,
        grace_seconds=preemption.grace_seconds,
    )


@dataclass(kw_only=True)
class Guard:
    """One rank's; a `Stateful` of checkpoints."""

    agreement: Agreement
    watchdog: Watchdog
    non_finite: NonFiniteSteps
    heart: Heart
    lost: Lost | None
    """What an earlier gang left unfinished; None on ranks other than 0."""
    restart: Restart
    validation_due: bool = False
    """True in the checkpoint of a validation that was cut short."""
    resumed_step: int = 0
    _was_finite: bool = field(default=True)

    @classmethod
    def open(
        cls, worker: WorkerContext, store: Store, *, faults: FaultPolicy, watchdog: Watchdog, generation: int
    ) -> "Guard":
        """Called by all ranks, when the generation of this start is known."""
        failpoints.set_generation(generation)
        return cls(
            agreement=Agreement.open(worker, every_steps=faults.agree_every),
            watchdog=watchdog,
            non_finite=NonFiniteSteps(policy=faults.non_finite),
            heart=Heart(store=store, generation=generation),
            lost=find_lost(store) if worker.is_first else None,
            restart=Restart(entered_at=time.time()),
        )

    def begin_step(self, step: int) -> None:
        """Send what this rank was asked for, before the step computes."""
        flags = asked() if self._was_finite else asked() | Flag.NON_FINITE
        self.agreement.begin(flags, step=step)

    def end_step(self, *, done: int, is_finite: bool) -> Flag:
        """What the ranks want after `done` steps.

        Raises:
            ClusterError: the ranks did not see the same gradient norm in the step before.
        """
        self.watchdog.waits_for("the other ranks")
        word = self.agreement.finish()
        if Flag.NON_FINITE in word and self._was_finite:
            raise ClusterError(
                f"step {done - 1}: the gradient norm was finite on this rank and not on another; they no longer hold "
                "the same model",
                hint="training resumes from the last commit; if it happens again, try `pipeline verify-resume`",
            )
        self._was_finite = is_finite
        if is_finite:
            self.non_finite.finite()
        self.watchdog.step_done()
        self.heart.beat(done)
        return word & ~Flag.NON_FINITE

    def poll(self) -> Flag:
        """What the ranks want now, between two passes of a validation."""
        failpoints.reach(failpoints.Place.VALIDATION)
        self.watchdog.progress()
        return self.agreement.agree(asked())

    def recovered(self, *, done: int, is_last: bool) -> dict[str, float]:
        """The cost of the interruption, once, after the first step that the old gang had not done; else nothing."""
        if self.lost is None:
            return {}
        now = time.time()
        if not self.restart.first_step_at:
            self.restart.first_step_at = now
        if done <= self.lost.pulse.step and not is_last:
            return {}
        self.restart.new_step_at = now
        lost, self.lost = self.lost, None
        return recovery_metrics(lost, self.restart, resumed_step=self.resumed_step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self.non_finite.state_dict(), "validation_due": self.validation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.non_finite.load_state_dict(state)
        self.validation_due = state["validation_due"]
