"""What one training run computes, typed, and the arithmetic of its batches.

Owns the values the loop reads and the derivation of gradient accumulation. Knows nothing of flows, Ray or files. The
one decision: the user says how many tokens (or examples) one optimizer step has; everything that depends on the number
of workers is derived, and what does not divide is an error with the values that would.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.errors import ParameterError

Schedule = Literal["cosine", "linear", "wsd", "constant"]
Parallel = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Positive = Annotated[int, Field(ge=1)]
"""The ranges hold where a config comes from a file; a flow's are those of `train.fsdp`."""
DEFAULT_TOKENS = 8192
DEFAULT_EXAMPLES = 64
DECAY_FRACTION = 5
_NOT_IDENTITY = frozenset(
    {
        "micro_batch_sequences",
        "parallel",
        "shard_group",
        "activation_checkpointing",
        "compile",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "validate_every_steps",
        "validation_sequences",
        "log_every_steps",
    }
)
"""Fields that may differ between a checkpoint and the run that resumes it: they change when something is observed, or
how a step is cut, but not which steps are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that decides the result. Steps count optimizer steps; batch sizes are in units and rows."""

    model: Mapping[str, Any] | str
    """The transformers config, as its JSON says; or `module:factory` of a module of the user's own."""
    steps: Positive
    micro_batch_sequences: Positive
    learning_rate: Annotated[float, Field(gt=0)]
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the factory."""
    loss: Literal["cross_entropy", "mean_squared_error"] = "cross_entropy"
    global_batch_tokens: Positive | None = None
    """For language models; 8192 where it is None."""
    global_batch_examples: Positive | None = None
    """For modules of the user's own; 64 where it is None."""
    schedule: Schedule = "cosine"
    minimum_learning_rate_ratio: float = 0.1
    decay_steps: Positive | None = None
    """Of wsd; a fifth of the steps where it is None."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    parallel: Parallel = "zero3"
    shard_group: Positive | None = None
    """Ranks that hold one copy of the model together; of hsdp."""
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every_steps: Positive = 50
    keep_checkpoints: Positive = 2
    validate_every_steps: Positive = 50
    validation_sequences: Positive = 64
    log_every_steps: Positive = 5
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def decay_steps_or_default(self) -> int:
        """Steps of the last phase of wsd."""
        return max(1, self.steps // DECAY_FRACTION) if self.decay_steps is None else self.decay_steps

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued, as JSON values."""
        values = {name: value for name, value in asdict(self).items() if name not in _NOT_IDENTITY}
        if isinstance(self.model, str):
            # Batch normalization takes its statistics from the rows of one forward pass.
            values["micro_batch_sequences"] = self.micro_batch_sequences
        identity: dict[str, Any] = json.loads(json.dumps(values))
        return identity


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How one optimizer step is cut."""

    rows_per_step: int
    rows_per_rank: int
    rows_per_micro_batch: int
    accumulation: int
    """Forward and backward passes of a rank in one optimizer step."""
    units_per_step: int
    """Tokens, or examples."""


def plan_batch(config: TrainConfig, *, sequence_length: int | None, world_size: int) -> BatchPlan:
    """Cut the global batch into rows, ranks and micro-batches.

    Args:
        config: the run.
        sequence_length: tokens in a row; None where a row is one example.
        world_size: ranks.

    Raises:
        ParameterError: it does not divide, or is given in the other unit; shows the arithmetic and the nearest values
            that do.
    """
    name, units = _global_batch(config, is_text=sequence_length is not None)
    micro, per_row = config.micro_batch_sequences, sequence_length or 1
    smallest = per_row * world_size * micro
    if units % smallest == 0:
        rows = units // per_row
        return BatchPlan(
            rows_per_step=rows,
            rows_per_rank=rows // world_size,
            rows_per_micro_batch=micro,
            accumulation=units // smallest,
            units_per_step=units,
        )
    below, above = units // smallest * smallest, -(-units // smallest) * smallest
    nearest = " or ".join(str(value) for value in (below, above) if value > 0)
    hint = f"set `{name}` to {nearest}"
    if units % (per_row * world_size) == 0:
        rows_per_rank = units // (per_row * world_size)
        divisors = [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]
        hint += f", or keep it and set `micro_batch_sequences` to one of {', '.join(map(str, divisors))}"
    in_words = "" if sequence_length is None else f"sequence_length {sequence_length} x "
    raise ParameterError(
        f"{name} {units} is no multiple of {in_words}{world_size} workers x micro_batch_sequences {micro} = {smallest} "
        f"(remainder {units % smallest})",
        hint=hint,
    )


def _global_batch(config: TrainConfig, *, is_text: bool) -> tuple[str, int]:
    """Name and value of the batch size in the dataset's own unit."""
    given = {"global_batch_tokens": config.global_batch_tokens, "global_batch_examples": config.global_batch_examples}
    name, other = tuple(given) if is_text else tuple(reversed(given))
    if given[other] is not None:
        held = "rows of tokens" if is_text else "examples"
        raise ParameterError(
            f"{other} {given[other]} was given, but the dataset holds {held}",
            hint=f"say how large an optimizer step is with `{name}`",
        )
    return name, given[name] or (DEFAULT_TOKENS if is_text else DEFAULT_EXAMPLES)
