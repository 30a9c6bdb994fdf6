"""The parameters of `train.fsdp` that say what happens on faults.

Owns their names, types, defaults, units and ranges. Knows nothing of how they are carried out. The one decision: all of
them stay out of the fingerprint; they change no step that goes well, and a training that a policy has stopped can go on
under another one.
"""

from typing import Literal

from pydantic import Field, model_validator

from pipeline.stages.parameter_fields import Parameters
from pipeline.training.fault_policy import NOT_NESTED, deadline_problems


class NonFiniteParameters(Parameters):
    """What a gradient norm that is not finite leads to."""

    skip: int = Field(default=0, ge=0, description="Steps in a row that may be skipped; parameters stay as they are.")
    then: Literal["stop", "rollback"] = Field(
        default="stop",
        description="After them: stop, naming step and rows; or go back to the last commit and on past the rows since, "
        "once for each commit.",
    )


class FaultParameters(Parameters):
    """Deadlines and policies. A deadline must be shorter than the next, so that the one that can name a fault is first.

    The order: collective, step, health check of the executor (a minute more than the step's), stage.
    """

    collective_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="A CPU rank that waits longer for another gives up. A rank on CUDA waits until it is ended by "
        "`step_timeout_seconds`: NCCL would end it without a word.",
    )
    step_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="A step, a validation pass or a save may take so long, or five times the median step where that is "
        "longer; then the rank says what it waits for and ends itself. A save may take a quarter more than "
        "`checkpoint_timeout_seconds` too.",
    )
    start_timeout_seconds: float = Field(
        default=900.0, gt=0, description="From the start of a rank to its first step done."
    )
    agree_every: int = Field(
        default=1, ge=1, description="Steps between two exchanges of what ranks were asked for (make way, stop, save)."
    )
    non_finite: NonFiniteParameters = Field(
        default_factory=NonFiniteParameters, description="What a gradient norm that is not finite leads to."
    )
    out_of_memory: Literal["stop", "smaller_micro_batch"] = Field(
        default="stop",
        description="stop names the rank and its peak; smaller_micro_batch halves the rows of a pass, and the global "
        "batch stays.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> "FaultParameters":
        problems = self.problems_within(None)
        if problems:
            raise ValueError(NOT_NESTED + "; ".join(problems))
        return self

    def problems_within(self, timeout_seconds: float | None) -> list[str]:
        """Deadlines in the wrong order.

        The stage's own is held against those that the flow changes; one that is shorter than a default is simply first.
        By their values, not by what was written: a resolved flow writes every default out.
        """
        names = ("step_timeout_seconds", "start_timeout_seconds")
        is_given = any(getattr(self, name) != type(self).model_fields[name].default for name in names)
        return deadline_problems(
            collective_timeout_seconds=self.collective_timeout_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            start_timeout_seconds=self.start_timeout_seconds,
            stage_timeout_seconds=timeout_seconds if is_given else None,
        )


class PreemptionParameters(Parameters):
    """How training makes way."""

    signals: list[Literal["TERM", "USR1", "USR2", "HUP", "INT"]] = Field(
        default=["TERM", "USR1"],
        description="Each, sent to the process of a rank, asks for a checkpoint and the end of training; INT stops it "
        "for good. On Ray, ranks that made way are started again where there is room.",
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="From the request to the end of the process, whether a checkpoint was made or not.",
    )
