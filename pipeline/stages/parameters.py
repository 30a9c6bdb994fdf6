"""The parameters of every stage kind: what `with:` may hold.

Owns names, types, defaults, units and ranges; `pipeline schema` and every error message are made from these models.
Knows nothing of how a stage works. The one decision: a field that cannot change what a stage computes (hosts, worker
processes, logging) is marked `identity=False` and stays out of the fingerprint.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.stages.parameter_fields import NOT_IDENTITY as NOT_IDENTITY
from pipeline.stages.parameter_fields import SOURCE_FILE as SOURCE_FILE
from pipeline.stages.parameter_fields import Device, PlainArguments
from pipeline.stages.parameter_fields import Parameters as Parameters
from pipeline.stages.reference import (
    AnyInput,
    CheckpointInput,
    DatasetInput,
    EvidenceInput,
    ExportInput,
    FlaxModelInput,
    TokenizerOrPlace,
)
from pipeline.stages.serve_parameters import DeployServeParameters as DeployServeParameters
from pipeline.stages.train_parameters import TrainFsdpParameters as TrainFsdpParameters
from pipeline.stages.user_module import FUNCTION_PATTERN

NAME_PATTERN = r"^[A-Za-z][\w-]*$"


class DataTextParameters(Parameters):
    """`data.text`: real text to packed token shards and a BPE tokenizer."""

    source: str = Field(
        "stdlib",
        description="`stdlib` (the source of this interpreter's standard library), or a file, glob, directory or "
        "fsspec URL.",
        json_schema_extra=NOT_IDENTITY,  # the digest of what it holds is identity, see the kind's `sources`
    )
    json_field: str | None = Field(
        None,
        description="Read the source as JSON Lines and take this field of each line as one document: a text, or, where "
        "`tokenizer` is of a model with a chat template, a list of messages (`role`, `content`), which it renders.",
    )
    tokenizer: TokenizerOrPlace | None = Field(
        None,
        description="A tokenizer that exists: a checkpoint or a text dataset of the flow that holds one, or a path "
        "(relative to the project) or fsspec URL of a `tokenizer.json` or of such a directory. One is trained on the "
        "text when absent.",
    )
    vocabulary_size: int = Field(
        4096, ge=300, le=1_000_000, description="Size of the BPE vocabulary that is trained; not with `tokenizer`."
    )
    sequence_length: int = Field(256, ge=8, le=1_048_576, description="Tokens in one packed training row.")
    validation_fraction: float = Field(0.05, gt=0.0, lt=0.5, description="Share of documents held out.")
    max_documents: int | None = Field(None, ge=2, description="Stop after this many documents (in a seeded order).")
    max_bytes: int | None = Field(None, ge=1, description="Stop after this many bytes of text.")
    shard_tokens: int = Field(1_048_576, ge=1024, description="Tokens in one shard file.")
    seed: int = Field(0, ge=0, description="Of the document order and the split.")

    @model_validator(mode="after")
    def _has_one_vocabulary(self) -> Self:
        if self.tokenizer is not None and "vocabulary_size" in self.model_fields_set:
            raise ValueError("`vocabulary_size` is that of `tokenizer`; leave one of them out")
        return self


class DataArraysParameters(Parameters):
    """`data.arrays`: named arrays (images, tables, anything of numbers) to split, checked shards."""

    source: str = Field(
        "builtin:digits",
        description="`builtin:digits` (1,797 handwritten digits of scikit-learn: `pixels`, `labels`), an `.npz` file, "
        "or `module:function` of the project that returns a mapping of names to arrays. Names are keywords of the "
        "model's `forward`.",
        json_schema_extra=NOT_IDENTITY,  # the digest of what it holds is identity, see the kind's `sources`
    )
    arguments: PlainArguments = Field(default_factory=dict, description="Keywords of the source's function.")
    target: str = Field("labels", description="The array that is predicted; integers are classes, floats are values.")
    validation_fraction: float = Field(0.2, gt=0.0, lt=1.0, description="Share of examples held out.")
    max_examples: int | None = Field(None, ge=2, description="Keep this many examples (in a seeded order).")
    shard_examples: int = Field(65_536, ge=1, description="Examples in one shard file.")
    seed: int = Field(0, ge=0, description="Of the order and the split.")
    sources: list[str] = Field(
        default_factory=list,
        description="Further files (relative to the project) that the function reads; their content is identity.",
        json_schema_extra=SOURCE_FILE,
    )


class DataMixtureParameters(Parameters):
    """`data.mixture`: several text datasets as one, in fixed proportions."""

    datasets: dict[Annotated[str, Field(pattern=NAME_PATTERN)], DatasetInput] = Field(
        min_length=2,
        description="Text datasets by name; they have one tokenizer and one `sequence_length`. Names are those of the "
        "metrics `epoch_NAME` of training.",
    )
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        description="Share of each dataset in the rows of training, to 1/10000 of their sum; under the same names."
    )


class DataStreamParameters(Parameters):
    """`data.stream`: a text dataset whose shards stay where they are, and come to a training one by one."""

    source: str = Field(
        description="Directory or fsspec URL that holds what `data.text` wrote, `manifest.json` and all.",
        # Identity, unlike other sources: what this stage hands on says where the shards are.
    )
    shuffled_shards: int = Field(
        4,
        ge=1,
        description="Shards whose rows are mixed with each other; twice as many lie in the cache of a host "
        "(`loader_cache_bytes` of `train.fsdp`).",
    )


class ImportCheckpointParameters(Parameters):
    """`import.checkpoint`: weights from elsewhere, for the stages that take a checkpoint."""

    source: str = Field(
        description="A directory, file or fsspec URL with a checkpoint: safetensors, torch `.bin` or `.pt`, GGUF, ONNX "
        "or DCP, with `config.json` or `module.json`. A path is relative to the project.",
        json_schema_extra=NOT_IDENTITY,  # the digest of what it holds is identity, see the kind's `sources`
    )


class ConvertFlaxParameters(Parameters):
    """`convert.flax`: a committed torch checkpoint to a Flax NNX model with its parameters in Orbax."""

    checkpoint: CheckpointInput = Field(description="The committed sharded checkpoint.")
    via: Literal["auto", "family", "trace"] = Field(
        "auto",
        description="family uses the rule table of the model's family, trace interprets the torch module; auto takes "
        "the family where there is one that takes the config, and says why.",
    )
    dtype: Literal["keep", "float32", "bfloat16"] = Field(
        "keep", description="keep takes each tensor's own dtype; the others cast every weight."
    )


class ConvertTorchParameters(Parameters):
    """`convert.torch`: a Flax model back to a directory that transformers loads."""

    model: FlaxModelInput = Field(description="The Flax model; trained further or as it was converted.")
    dtype: Literal["keep", "float32", "bfloat16"] = Field(
        "keep", description="keep is the dtype that each tensor had in the checkpoint; the others cast every weight."
    )
    max_shard_bytes: int = Field(50 * 10**9, ge=1, description="Of each safetensors file.")


class ConvertOnnxParameters(Parameters):
    """`convert.onnx`: an ONNX model, checked with onnxruntime against the torch model."""

    model: ExportInput = Field(description="A Flax model, or the checkpoint of a torch model.")
    opset: int | None = Field(None, ge=18, description="ONNX opset; the exporter's own choice when absent.")
    int8: bool = Field(
        False, description="Also write a model whose weights are int8, by onnxruntime's dynamic quantizer."
    )


class EvaluateParityParameters(Parameters):
    """`evaluate.parity`: torch and Flax side by side in float32: tensors, blocks, outputs."""

    checkpoint: CheckpointInput = Field(description="The torch side.")
    model: FlaxModelInput = Field(description="The Flax side.")
    dataset: DatasetInput | None = Field(
        None,
        description="Text, for models that generate text: its validation split is the input of both. Random inputs "
        "of the model's own description are compared either way.",
    )
    block_limit: float = Field(1e-5, gt=0, description="Relative error above which a block is named.")
    num_sequences: int = Field(8, ge=1, description="Held-out rows compared.")
    num_prompts: int = Field(4, ge=1, description="Greedy continuations of held-out rows compared.")
    prompt_tokens: int = Field(16, ge=1, description="Tokens in a prompt of held-out rows.")
    continuation_tokens: int = Field(32, ge=1, description="Tokens continued greedily.")


class EvaluateLossParameters(Parameters):
    """`evaluate.loss`: validation loss of the Flax model, with perplexity for text and accuracy for classes."""

    model: FlaxModelInput = Field(description="The model judged.")
    dataset: DatasetInput = Field(description="Its validation split is the input: rows of tokens, or arrays.")
    num_sequences: int = Field(128, ge=1, description="Held-out rows (sequences or examples) at most.")
    batch_sequences: int = Field(8, ge=1, description="Rows in one forward pass.", json_schema_extra=NOT_IDENTITY)
    device: Device = Field("auto", description="Where jax runs.", json_schema_extra=NOT_IDENTITY)


class RegisterModelParameters(Parameters):
    """`register.model`: a model version with lineage, under an alias."""

    model: FlaxModelInput = Field(description="What is registered.")
    evidence: list[EvidenceInput] = Field(
        default_factory=list, description="Reports that speak for it; their gates and metrics become tags."
    )
    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$", description="Name of the registered model.")
    alias: str | None = Field("champion", pattern=r"^[A-Za-z][\w-]*$", description="Alias that moves to this version.")


class PythonCallParameters(Parameters):
    """`python.call`: a stage of the user's own, `(StageContext) -> StageResult`."""

    call: str = Field(pattern=FUNCTION_PATTERN, description="`module:function`, importable from the project.")
    inputs: dict[str, AnyInput] = Field(default_factory=dict, description="Artifacts the function reads, by name.")
    arguments: PlainArguments = Field(
        default_factory=dict, description="Plain values the function reads from `context.parameters.arguments`."
    )
    outputs: list[Annotated[str, Field(pattern=NAME_PATTERN)]] = Field(
        default_factory=list, description="Directories the function writes with `context.output(NAME)`."
    )
    framework: Literal["none", "torch", "jax"] = Field(
        "none", description="The framework its process may load; never both.", json_schema_extra=NOT_IDENTITY
    )
    sources: list[str] = Field(
        default_factory=list,
        description="Further files (relative to the project) whose content is part of the fingerprint.",
        json_schema_extra=SOURCE_FILE,
    )
