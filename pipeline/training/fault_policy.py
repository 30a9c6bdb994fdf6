"""What training is told to do about faults, typed, and the order of its deadlines.

Owns the values and their ranges. Pure. The one decision: deadlines are nested (collective < step < executor's health
check < the stage's own), so the one nearest to a fault speaks first and can name it.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

Signal = Literal["TERM", "USR1", "USR2", "HUP", "INT"]
Seconds = Annotated[float, Field(gt=0)]
NOT_NESTED = "deadlines are not nested: "
HEALTH_CHECK_MARGIN_SECONDS = 60.0
"""A watchdog that ends its process is given so long before the executor ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinitePolicy:
    """What a gradient norm that is not finite leads to."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    skip: Annotated[int, Field(ge=0)] = 0
    """Steps in a row that may be skipped."""
    then: Literal["stop", "rollback"] = "stop"
    """After them: stop; or go back to the last commit, once for each, and on past the rows met since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPolicy:
    """Deadlines and policies of one training."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    collective_timeout_seconds: Seconds = 300.0
    """A rank that waits longer for another one gives up; on CPU ranks, see `group_timeout_seconds`."""
    step_timeout_seconds: Seconds = 600.0
    """A step, a validation or a save may take so long, or five times the median step where that is longer; a save may
    take a checkpoint's own timeout too."""
    start_timeout_seconds: Seconds = 900.0
    """From the start of a rank to the end of its first step."""
    agree_every: Annotated[int, Field(ge=1)] = 1
    """Steps between two exchanges of what ranks were asked for."""
    non_finite: NonFinitePolicy = field(default_factory=NonFinitePolicy)
    out_of_memory: Literal["stop", "smaller_micro_batch"] = "stop"

    def __post_init__(self) -> None:
        """Raise ValueError where deadlines are not nested."""
        problems = deadline_problems(
            collective_timeout_seconds=self.collective_timeout_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            start_timeout_seconds=self.start_timeout_seconds,
        )
        if problems:
            raise ValueError(NOT_NESTED + "; ".join(problems))

    @property
    def health_check_timeout_seconds(self) -> float:
        """How long an executor waits for a rank that gives no sign of life."""
        return self.step_timeout_seconds + HEALTH_CHECK_MARGIN_SECONDS

    def group_timeout_seconds(self, device: Literal["cpu", "cuda"]) -> float:
        """How long a rank waits in a collective.

        NCCL ends the process where it gives up, before the rank that hangs could name itself, so on CUDA it is the last
        to do so.
        """
        if device == "cpu":
            return self.collective_timeout_seconds
        return self.start_timeout_seconds + HEALTH_CHECK_MARGIN_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """How training makes way."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    signals: tuple[Signal, ...] = ("TERM", "USR1")
    """Each asks for a checkpoint and the end; INT asks to stop."""
    grace_seconds: Seconds = 30.0
    """From the request to the end of the process, whether a checkpoint was committed or not."""


def deadline_problems(
    *,
    collective_timeout_seconds: float,
    step_timeout_seconds: float,
    start_timeout_seconds: float,
    stage_timeout_seconds: float | None = None,
) -> list[str]:
    """Every pair of deadlines in the wrong order, in words; empty where all are nested.

    Args:
        collective_timeout_seconds: of `FaultPolicy`, as the next two.
        step_timeout_seconds: as above.
        start_timeout_seconds: as above.
        stage_timeout_seconds: the stage's `timeout_seconds`; None where the flow sets none.
    """
    health = step_timeout_seconds + HEALTH_CHECK_MARGIN_SECONDS
    nested = [
        ("collective_timeout_seconds", collective_timeout_seconds, "step_timeout_seconds", step_timeout_seconds),
        ("step_timeout_seconds", step_timeout_seconds, "start_timeout_seconds", start_timeout_seconds),
    ]
    if stage_timeout_seconds is not None:
        name = "the stage's timeout_seconds"
        nested += [
            ("the health check (step_timeout_seconds + 60)", health, name, stage_timeout_seconds),
            ("start_timeout_seconds", start_timeout_seconds, name, stage_timeout_seconds),
        ]
    return [
        f"{inner} is {inner_value:g} and must be below {outer}, which is {outer_value:g}"
        for inner, inner_value, outer, outer_value in nested
        if inner_value >= outer_value
    ]
