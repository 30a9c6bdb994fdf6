"""What one training run computes, typed, and the arithmetic of its batches.

Owns the values the loop reads and the derivation of gradient accumulation. Knows nothing of flows, Ray or files. The
one decision: the user says how many tokens one optimizer step has; everything that depends on the number of workers is
derived, and what does not divide is an error with the values that would.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.errors import ParameterError

_NOT_IDENTITY = frozenset(
    {
        "micro_batch_sequences",
        "reshard_after_forward",
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
    """Everything that decides the result. Steps count optimizer steps; batch sizes are in tokens and rows."""

    model: Mapping[str, Any]
    """The transformers config, as its JSON says."""
    steps: int
    global_batch_tokens: int
    micro_batch_sequences: int
    learning_rate: float
    minimum_learning_rate_ratio: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_gradient_norm: float = 1.0
    reshard_after_forward: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every_steps: int = 50
    keep_checkpoints: int = 2
    validate_every_steps: int = 50
    validation_sequences: int = 64
    log_every_steps: int = 5
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued, as JSON values."""
        values = {name: value for name, value in asdict(self).items() if name not in _NOT_IDENTITY}
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
    tokens_per_step: int


def plan_batch(config: TrainConfig, *, sequence_length: int, world_size: int) -> BatchPlan:
    """Cut `global_batch_tokens` into rows, ranks and micro-batches.

    Raises:
        ParameterError: it does not divide; shows the arithmetic and the nearest values that do.
    """
    tokens, micro = config.global_batch_tokens, config.micro_batch_sequences
    unit = sequence_length * world_size * micro
    if tokens % unit == 0:
        accumulation = tokens // unit
        rows = tokens // sequence_length
        return BatchPlan(
            rows_per_step=rows,
            rows_per_rank=rows // world_size,
            rows_per_micro_batch=micro,
            accumulation=accumulation,
            tokens_per_step=tokens,
        )
    below, above = tokens // unit * unit, -(-tokens // unit) * unit
    nearest = " or ".join(str(value) for value in (below, above) if value > 0)
    hint = f"set `global_batch_tokens` to {nearest}"
    if tokens % (sequence_length * world_size) == 0:
        rows_per_rank = tokens // (sequence_length * world_size)
        divisors = [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]
        hint += f", or keep it and set `micro_batch_sequences` to one of {', '.join(map(str, divisors))}"
    raise ParameterError(
        f"global_batch_tokens {tokens} is no multiple of sequence_length {sequence_length} x {world_size} workers x "
        f"micro_batch_sequences {micro} = {unit} (remainder {tokens % unit})",
        hint=hint,
    )
