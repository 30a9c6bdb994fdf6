"""The keys of a flow file, apart from what a stage kind takes in `with:`.

Owns names, types, defaults and meanings of the keys; the reader, the JSON Schema and the error messages are made from
these tables. Knows nothing of YAML or of stage kinds. The one decision: a flow has no version key and no `needs`; the
graph is what the references say.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

FLOW_KEYS: Mapping[str, str] = {
    "flow": "Name of the flow.",
    "description": "For people.",
    "params": "Values that -P may override: NAME: VALUE, or NAME: {type, default, minimum, maximum, choices}.",
    "stages": "The stages by name; references between them make the graph.",
}
STAGE_KEYS: Mapping[str, str] = {
    "uses": "The stage kind.",
    "description": "For people.",
    "with": "The parameters of the kind; may refer to ${params.NAME} and ${stages.STAGE.outputs.OUTPUT}.",
    "resources": "What the stage asks of the cluster.",
    "gates": "Conditions on the stage's metrics that must hold before a dependent stage starts.",
    "retry": "How often an attempt that failed for infrastructure is repeated.",
    "timeout_seconds": "An attempt that takes longer is ended.",
    "fallback": "What is tried, in this order, when the stage has used up its attempts.",
}
FALLBACK_KEYS: Mapping[str, str] = {
    "on": "Classes of failure that this hop is for; infra alone where it is absent.",
    "with": "Parameters of the kind that take the place of the stage's own.",
    "resources": "Keys of resources that take the place of the stage's own.",
    "timeout_seconds": "In place of the stage's own.",
    "keep": "Ends the stage without a result of its own: what the deployment serves, or the alias names, stays.",
}
MAX_WORKERS = 4096
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
NAME_FORM = "a letter, then at most 63 letters, digits, _ and -"
MEMORY_PATTERN = r"^\d+(\.\d+)?\s*(B|[kKMGT]i?B)?$"
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:B|([kKMGT])(i?)B)?", re.ASCII)
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def is_name(text: str) -> bool:
    """True for a name of a stage or a parameter."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def memory_bytes(text: str) -> int:
    """`2GiB`, `512 MB` or plain bytes as a number of bytes; `i` units are powers of 1024, the others of 1000.

    Raises:
        ValueError: the text has another form, or is beyond 64 bits.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None or len(match[1]) > 18:
        raise ValueError(f"{text!r} is no amount of memory such as 2GiB, 512MB or a number of bytes")
    unit = Decimal(1024 if match[3] else 1000) ** _POWERS.get(match[2], 0)
    return int(Decimal(match[1]) * unit)


class _Grammar(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WorkerRange(_Grammar):
    """`workers:` of a gang that goes on with fewer workers and grows again."""

    min: int = Field(ge=1, le=MAX_WORKERS, description="Fewest workers that training goes on with.")
    max: int = Field(ge=1, le=MAX_WORKERS, description="Most workers it grows to.")

    @model_validator(mode="after")
    def _check_order(self) -> "WorkerRange":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class ResourcesSpec(_Grammar):
    """`resources:` of a stage; what is absent is the kind's default."""

    workers: int | WorkerRange = Field(
        default=1,
        description="Size of the gang, or {min, max} of one that follows the cluster; 1 for kinds that are no gang.",
        json_schema_extra={"minimum": 1, "maximum": MAX_WORKERS},
    )
    cpus: float | None = Field(
        default=None, gt=0, description="CPUs of each worker, or of the stage's actor or replica."
    )
    gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs of each worker or replica, may be a fraction; absent, GPUs are used where there are any.",
    )
    memory: str | None = Field(default=None, description="Memory of each worker or replica, for example 2GiB.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that a node must have to run the stage, for example {ray.io/accelerator-type: H100}; "
        "for gangs and stages in one process.",
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: int | WorkerRange) -> int | WorkerRange:
        if isinstance(value, int) and value < 1:
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        if isinstance(value, int) and value > MAX_WORKERS:
            raise PydanticKnownError("less_than_equal", {"le": MAX_WORKERS})
        return value

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value is not None:
            memory_bytes(value)
        return value

    @property
    def max_workers(self) -> int:
        """The most workers."""
        return self.workers if isinstance(self.workers, int) else self.workers.max

    @property
    def min_workers(self) -> int:
        """The fewest workers; as many as the most where the number is fixed."""
        return self.workers if isinstance(self.workers, int) else self.workers.min

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes; 0 where the flow does not say."""
        return 0 if self.memory is None else memory_bytes(self.memory)


class RetryPolicy(_Grammar):
    """`retry:` of a stage; counts attempts that failed for infrastructure."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts in one run, the first included.")
    backoff_seconds: float = Field(
        default=2.0, ge=0, le=3600, description="Wait before the second attempt; doubled before each further one."
    )


class StageLimits(_Grammar):
    """Keys of a stage that are plain values."""

    timeout_seconds: float | None = Field(default=None, gt=0, description=STAGE_KEYS["timeout_seconds"])


class FallbackLimits(_Grammar):
    """Keys of a hop of `fallback:` that are plain values."""

    on: list[Literal["infra", "user", "gate"]] = Field(default=["infra"], min_length=1, description=FALLBACK_KEYS["on"])
    keep: Literal["champion"] | None = Field(default=None, description=FALLBACK_KEYS["keep"])


class Conditions(_Grammar):
    """`gates:` of a stage, read as text first."""

    gates: dict[str, str] = Field(default_factory=dict, description=STAGE_KEYS["gates"])
