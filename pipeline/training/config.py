"""What one training run computes, typed, and the arithmetic of its batches.

Owns the values the loop reads and the derivation of gradient accumulation. Knows nothing of flows, Ray or files. The
one decision: the user says how many tokens (or examples) one optimizer step has; everything that depends on the number
of workers is derived, and what does not divide is an error with the values that would.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from pipeline.errors import ParameterError
from pipeline.training.fault_policy import FaultPolicy, Preemption

Schedule = Literal["cosine", "linear", "wsd", "constant"]
Parallel = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Precision = Literal["float32", "bfloat16", "float16", "float8"]
Offload = Literal["none", "optimizer", "all"]
ActivationCheckpointing = Literal["none", "full", "selective"]
OptimizerName = Literal["adamw", "muon"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]
Positive = Annotated[int, Field(ge=1)]
"""The ranges hold where a config comes from a file; a flow's are those of `train.fsdp`."""
PositiveSeconds = Annotated[float, Field(gt=0)]
DEFAULT_TOKENS = 8192
DEFAULT_EXAMPLES = 64
DECAY_FRACTION = 5
_NOT_IDENTITY = frozenset(
    {
        "micro_batch_sequences",
        "parallel",
        "shard_group",
        "mesh",
        "offload",
        "activation_checkpointing",
        "compile",
        "checkpoint_every_steps",
        "checkpoint_interval_seconds",
        "device_mttf_hours",
        "checkpoint_async",
        "checkpoint_timeout_seconds",
        "keep_checkpoints",
        "validate_every_steps",
        "validation_sequences",
        "log_every_steps",
        "loader_workers",
        "loader_cache_bytes",
        "faults",
        "preemption",
    }
)
"""Fields that may differ between a checkpoint and the run that resumes it: they change when something is observed, or
how a step is cut, but not which steps are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """Sizes of the mesh's axes that cut the model itself; data ranks are what they leave of the workers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    tensor: Positive = 1
    """Ranks that compute one block together."""
    context: Positive = 1
    """Ranks that hold one row together."""
    pipeline: Positive = 1
    """Ranks that hold consecutive blocks."""
    schedule: PipelineSchedule = "1f1b"
    """Order of micro-batches in a pipeline."""

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor * self.context * self.pipeline

    @property
    def in_words(self) -> str:
        """Such as `tensor 2 x pipeline 2`."""
        axes = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "no axis"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """How the parameters of some names are updated; a parameter belongs to the first group whose pattern it matches."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    match: str
    """Regular expression, searched for in a parameter's name."""
    learning_rate_ratio: Annotated[float, Field(ge=0)] = 1.0
    """Of the schedule's rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """As for all parameters where it is None."""
    optimizer: OptimizerName | None = None
    """As for all parameters where it is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """An exponential moving average of the parameters."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    decay: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters of low rank; they alone are trained."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """An adapter's output counts alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of an adapter's input."""
    targets: tuple[str, ...] = ()
    """Ends of names of linear layers; all but the head where there are none."""


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
    initial: str | None = None
    """Digest of the weights that training starts from; from scratch where it is None."""
    lora: Lora | None = None
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
    optimizer: OptimizerName = "adamw"
    parameter_groups: tuple[ParameterGroup, ...] = ()
    freeze: tuple[str, ...] = ()
    """Regular expressions of parameters that stay as they are."""
    ema: Ema | None = None
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    parallel: Parallel = "zero3"
    shard_group: Positive | None = None
    """Ranks that hold one copy of the model together; of hsdp."""
    mesh: MeshSizes = field(default_factory=MeshSizes)
    precision: Precision = "float32"
    offload: Offload = "none"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    checkpoint_every_steps: Positive = 50
    checkpoint_interval_seconds: Literal["auto"] | PositiveSeconds | None = None
    """By the clock instead of by steps; auto is Young's formula."""
    device_mttf_hours: PositiveSeconds = 8090.0
    """Mean time to failure of one device, of which auto makes that of all."""
    checkpoint_async: bool = True
    """Train on while a checkpoint is written."""
    checkpoint_timeout_seconds: PositiveSeconds = 1800.0
    """A rank waits so long for another one's bytes to be written."""
    keep_checkpoints: Positive = 2
    validate_every_steps: Positive = 50
    validation_sequences: Positive = 64
    log_every_steps: Positive = 5
    document_masks: bool = False
    """Attention, positions and targets of a row stay inside its documents."""
    loader_workers: Positive = 1
    """Steps whose rows are read ahead, each by a thread of its own."""
    loader_cache_bytes: Positive = 4 << 30
    """Shards from elsewhere that are kept on a host."""
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    """No identity: a policy changes no step that goes well, and one that stopped training may be mended to go on."""
    preemption: Preemption = field(default_factory=Preemption)
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
        world_size: ranks; those of `config.mesh` work on the same rows.

    Raises:
        ParameterError: it does not divide, or is given in the other unit; shows the arithmetic and the nearest values
            that do.
    """
    name, units = _global_batch(config, is_text=sequence_length is not None)
    micro, per_row = config.micro_batch_sequences, sequence_length or 1
    data_ranks = max(1, world_size // config.mesh.model_ranks)
    smallest = per_row * data_ranks * micro
    if units % smallest == 0:
        rows = units // per_row
        return BatchPlan(
            rows_per_step=rows,
            rows_per_rank=rows // data_ranks,
            rows_per_micro_batch=micro,
            accumulation=units // smallest,
            units_per_step=units,
        )
    below, above = units // smallest * smallest, -(-units // smallest) * smallest
    nearest = " or ".join(str(value) for value in (below, above) if value > 0)
    hint = f"set `{name}` to {nearest}"
    if units % (per_row * data_ranks) == 0:
        rows_per_rank = units // (per_row * data_ranks)
        divisors = [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]
        hint += f", or keep it and set `micro_batch_sequences` to one of {', '.join(map(str, divisors))}"
    in_words = "" if sequence_length is None else f"sequence_length {sequence_length} x "
    workers = f"{world_size} workers"
    if config.mesh.model_ranks > 1:
        workers = f"{data_ranks} data ranks ({workers} / {config.mesh.in_words})"
    raise ParameterError(
        f"{name} {units} is no multiple of {in_words}{workers} x micro_batch_sequences {micro} = {smallest} "
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
