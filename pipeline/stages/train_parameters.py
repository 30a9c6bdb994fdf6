"""The parameters of `train.fsdp`.

Owns their names, types, defaults, units and ranges. Knows nothing of how a model is trained. The one decision: what
cannot change which steps are taken, or what they compute, stays out of the fingerprint.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.stages.parameter_fields import NOT_IDENTITY, SOURCE_FILE, Device, Parameters, PlainArguments
from pipeline.stages.reference import CheckpointOrPlace, DatasetInput
from pipeline.stages.train_fault_parameters import FaultParameters, PreemptionParameters
from pipeline.stages.train_mesh_parameters import MeshParameters
from pipeline.stages.train_start_parameters import LoraParameters
from pipeline.stages.train_update_parameters import EmaParameters, ParameterGroupParameters, Pattern


class TrainFsdpParameters(Parameters):
    """`train.fsdp`: train a torch model with FSDP2 on Ray Train workers."""

    dataset: DatasetInput = Field(description="Packed token shards, or arrays.")
    model: str | None = Field(
        None,
        description="For text: a transformers config file (JSON) relative to the project; that of `initial` when "
        "absent. For arrays: `module:factory` of the project, a function that returns a `torch.nn.Module` whose "
        "`forward` takes the dataset's arrays by name and returns logits or values.",
        json_schema_extra=SOURCE_FILE,
    )
    model_arguments: PlainArguments = Field(default_factory=dict, description="Keywords of the model's factory.")
    initial: CheckpointOrPlace | None = Field(
        None,
        description="Weights to start from: a checkpoint of the flow, or a path (relative to the project) or fsspec "
        "URL of a Hugging Face directory, a GGUF file or a committed checkpoint. Random ones, by `seed`, when absent.",
    )
    lora: LoraParameters | None = Field(
        None, description="Train adapters on frozen `initial` weights. All parameters are trained when absent."
    )
    loss: Literal["cross_entropy", "mean_squared_error"] = Field(
        "cross_entropy", description="cross_entropy for classes (and tokens), mean_squared_error for values."
    )
    steps: int = Field(ge=1, description="Optimizer steps.")
    global_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="For text: tokens in one optimizer step over all ranks; accumulation is derived from it. 8192 when "
        "absent.",
    )
    global_batch_examples: int | None = Field(
        None, ge=1, description="For arrays: examples in one optimizer step over all ranks. 64 when absent."
    )
    micro_batch_sequences: int = Field(
        8,
        ge=1,
        description="Rows (sequences or examples) in one forward pass of one rank. Batch normalization takes its "
        "statistics from these rows.",
    )
    learning_rate: float = Field(1e-3, gt=0.0, description="Peak of the schedule.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="After warm-up: cosine and linear fall to the floor at the last step, wsd stays at the peak and "
        "falls over the last `decay_steps`, constant stays.",
    )
    decay_steps: int | None = Field(None, ge=1, description="wsd: steps of the fall; a fifth of all steps when absent.")
    minimum_learning_rate_ratio: float = Field(0.1, ge=0.0, le=1.0, description="Floor of the schedule over its peak.")
    warmup_steps: int = Field(20, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.1, ge=0.0, description="AdamW's, on matrices only.")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="AdamW's.")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="AdamW's.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon updates matrices inside blocks by Muon, at AdamW's rate and decay, and the rest by AdamW.",
    )
    parameter_groups: list[ParameterGroupParameters] = Field(
        default_factory=list, description="Parameters with a rate or decay of their own; the first that matches counts."
    )
    freeze: list[Pattern] = Field(
        default_factory=list,
        description="Regular expressions of parameter names that are not trained; they stay in the checkpoint.",
    )
    ema: EmaParameters | None = Field(
        None,
        description="Keep a moving average of the parameters, and hand that on as the model. No average when absent.",
    )
    max_gradient_norm: float = Field(1.0, gt=0.0, description="Clip the global gradient norm to this.")
    parallel: Literal["ddp", "zero1", "zero2", "zero3", "hsdp"] = Field(
        "zero3",
        description="What a rank holds: ddp all of it; zero1 its share of the optimizer's state; zero2 of the "
        "gradients too; zero3 of the parameters too; hsdp is zero3 inside groups of `shard_group` ranks and ddp across "
        "them.",
    )
    shard_group: int | None = Field(
        None, ge=1, description="hsdp: ranks that hold one copy of the model together; it divides the data ranks."
    )
    mesh: MeshParameters = Field(
        default_factory=MeshParameters,
        description="Axes that cut the model itself, for llama, mistral, qwen2 and qwen3. The workers that they leave "
        "are data ranks.",
        json_schema_extra=NOT_IDENTITY,
    )
    precision: Literal["float32", "bfloat16", "float16", "float8"] = Field(
        "float32",
        description="Compute dtype; parameters, reductions and optimizer stay float32. bfloat16 needs CUDA; float16 "
        "scales the loss; float8 computes the matrix products of blocks in it, the rest in bfloat16.",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What lies in host memory while a GPU has no use for it: the optimizer's state, or parameters and "
        "gradients too (the optimizer then runs on the CPU).",
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="What a block computes again in the backward pass instead of keeping it: full all of it, selective "
        "all but attention and matrix products.",
        json_schema_extra=NOT_IDENTITY,
    )
    compile: bool = Field(False, description="torch.compile each block.")
    checkpoint_every_steps: int = Field(50, ge=1, description="Steps between committed checkpoints.")
    checkpoint_interval_seconds: Literal["auto"] | Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Seconds between checkpoints, instead of `checkpoint_every_steps`; auto takes what loses the least "
        "time by Young's formula, sqrt(2 x measured stall x mean time to failure of all devices).",
        json_schema_extra=NOT_IDENTITY,
    )
    device_mttf_hours: float = Field(
        8090.0,
        gt=0.0,
        description="auto: mean time to failure of one device; the default is 7.9 h measured with 1024 GPUs.",
        json_schema_extra=NOT_IDENTITY,
    )
    checkpoint_async: bool = Field(
        True,
        description="Training goes on once its state is copied to host memory; the checkpoint is written and committed "
        "meanwhile. One at a time: the next one waits.",
        json_schema_extra=NOT_IDENTITY,
    )
    checkpoint_timeout_seconds: float = Field(
        1800.0,
        gt=0.0,
        description="A rank waits so long for another one's part of a checkpoint.",
        json_schema_extra=NOT_IDENTITY,
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Committed checkpoints kept while training; what was not committed does not count."
    )
    validate_every_steps: int = Field(50, ge=1, description="Steps between validation losses.")
    validation_sequences: int = Field(
        64, ge=1, description="Held-out rows (sequences or examples) in one validation loss."
    )
    log_every_steps: int = Field(5, ge=1, description="Steps between reported metrics.", json_schema_extra=NOT_IDENTITY)
    document_masks: bool = Field(
        False,
        description="For text: attention and positions of a row stay inside its documents, and the first token of a "
        "document is no target. A loss is then a mean over the targets that remain, counted in each step.",
    )
    loader_workers: int = Field(
        1,
        ge=1,
        description="Steps whose rows are read ahead, and shards that are fetched at a time; a thread each.",
        json_schema_extra=NOT_IDENTITY,
    )
    loader_cache_bytes: int = Field(
        4 << 30,
        ge=1,
        description="Bytes of shards from elsewhere (`data.stream`) that are kept on a host.",
        json_schema_extra=NOT_IDENTITY,
    )
    device: Device = Field(
        "auto",
        description="auto takes CUDA (NCCL) where every worker has a GPU, else the CPU (gloo), and says why.",
        json_schema_extra=NOT_IDENTITY,
    )
    max_worker_failures: int = Field(
        2, ge=0, description="Restarts of the worker group inside one attempt.", json_schema_extra=NOT_IDENTITY
    )
    faults: FaultParameters = Field(
        default_factory=FaultParameters,
        description="Deadlines, and what is done about gradients that are not finite and about too little memory.",
        json_schema_extra=NOT_IDENTITY,
    )
    preemption: PreemptionParameters = Field(
        default_factory=PreemptionParameters,
        description="How training makes way when its machine is taken away: one checkpoint, then the end of its ranks.",
        json_schema_extra=NOT_IDENTITY,
    )
    seed: int = Field(0, ge=0, description="Of initial weights and batch order.")
    sources: list[str] = Field(
        default_factory=list,
        description="Further files (relative to the project) that the model's module imports; their content is "
        "identity.",
        json_schema_extra=SOURCE_FILE,
    )

    def problems_within(self, timeout_seconds: float | None) -> list[str]:
        """Deadlines of `faults` that are longer than the stage's."""
        return self.faults.problems_within(timeout_seconds)

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model is None and self.initial is None:
            raise ValueError("`model` or `initial` must say what is trained: a config file, or weights with a config")
        return self
