"""The parameters of `train.fsdp` that say how some parameters are updated: `parameter_groups`, `ema`.

Owns names, types, defaults and ranges. Knows nothing of optimizers. The one decision: a pattern that is no regular
expression is an error with a line number, before any model is built.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.stages.parameter_fields import Parameters


def _expression(given: str) -> str:
    try:
        re.compile(given)
    except re.error as error:
        raise ValueError(f"{given!r} is no regular expression: {error}") from error
    return given


Pattern = Annotated[str, AfterValidator(_expression)]
"""A regular expression, searched for in names of parameters."""


class ParameterGroupParameters(Parameters):
    """`parameter_groups` of `train.fsdp`: how the parameters of some names are updated."""

    match: Pattern = Field(description="Regular expression, searched for in a parameter's name.")
    learning_rate_ratio: float = Field(1.0, ge=0.0, description="Rate over the schedule's.")
    weight_decay: float | None = Field(None, ge=0.0, description="The stage's when absent.")
    optimizer: Literal["adamw", "muon"] | None = Field(None, description="The stage's when absent.")


class EmaParameters(Parameters):
    """`ema` of `train.fsdp`: an exponential moving average of the parameters."""

    decay: float = Field(
        gt=0.0, lt=1.0, description="What is kept of the average in a step; less in the first ones: (1 + t) / (10 + t)."
    )
