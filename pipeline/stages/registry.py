"""The one table of stage kinds.

Owns which kinds exist, what they read and write, and where their code is. Everything heavy is a dotted string that a
worker resolves; `validate` and `plan` read only this table and `parameters.py`. The one decision: a kind's `version`
is raised by hand when its code starts to compute something else; that, not a hash of the source, is its identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.stages import parameters
from pipeline.stages.parameters import Parameters


class Framework(StrEnum):
    """What a stage's process may load; `both` is for conversion and parity only."""

    NONE = "none"
    TORCH = "torch"
    JAX = "jax"
    BOTH = "both"


class Location(StrEnum):
    """Where a stage runs: in an actor of its own on the cluster, or in the driver (only the tracker's own work)."""

    WORKER = "worker"
    DRIVER = "driver"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """One row of the table."""

    name: str
    version: int
    parameters: type[Parameters]
    run: str
    """`module:function`, a `StageFunction`; empty where the stage's own parameters name it."""
    outputs: Mapping[str, str]
    """Output name to artifact type."""
    framework: Framework
    location: Location = Location.WORKER
    sources: str | None = None
    """`module:function` `(parameters, project_root) -> Mapping[str, str]`: digests of what it reads from outside."""
    verify: str | None = None
    """`module:function` `(commit, environment, registry) -> str | None`: why a committed result no longer holds.

    Light, for `plan` asks too; it has no registry to give.
    """
    summary: str = ""
    gang: bool = False
    """True where `resources.workers` starts that many workers beside the stage's own actor."""
    delegates: bool = False
    """True where resources are for what the stage starts (a gang, replicas) and its own actor holds none."""
    auto_gpus: float = 0.0
    """GPUs of each worker or replica where the flow leaves them open and the cluster has enough."""
    default_cpus: float = 0.5
    """CPUs of each worker (gang), or of the stage's actor or replica, where the flow does not say."""
    default_metrics: tuple[str, ...] = field(default=())
    """Names a gate may use; empty where any name may."""


KINDS: Mapping[str, StageKind] = {
    kind.name: kind
    for kind in (
        StageKind(
            name="data.text",
            version=2,
            parameters=parameters.DataTextParameters,
            run="pipeline.stages.data_text:run",
            outputs={"dataset": "dataset"},
            framework=Framework.NONE,
            sources="pipeline.stages.text_identity:digests",
            summary="read text, split it, train a tokenizer, pack token shards",
            default_metrics=(
                "num_documents",
                "num_bytes",
                "num_train_tokens",
                "num_validation_tokens",
                "vocabulary_size",
                "bytes_per_token",
            ),
        ),
        StageKind(
            name="data.arrays",
            version=1,
            parameters=parameters.DataArraysParameters,
            run="pipeline.stages.data_arrays:run",
            outputs={"dataset": "dataset"},
            framework=Framework.NONE,
            sources="pipeline.stages.array_source_identity:digests",
            summary="read named arrays, check them, split them, write shards",
            default_metrics=(
                "num_examples",
                "num_train_examples",
                "num_validation_examples",
                "num_classes",
                "num_bytes",
            ),
        ),
        StageKind(
            name="data.mixture",
            version=1,
            parameters=parameters.DataMixtureParameters,
            run="pipeline.stages.data_mixture:run",
            outputs={"dataset": "dataset"},
            framework=Framework.NONE,
            summary="mix text datasets in fixed proportions",
            default_metrics=("num_train_tokens", "num_validation_tokens", "vocabulary_size"),
        ),
        StageKind(
            name="data.stream",
            version=1,
            parameters=parameters.DataStreamParameters,
            run="pipeline.stages.data_stream:run",
            outputs={"dataset": "dataset"},
            framework=Framework.NONE,
            sources="pipeline.stages.stream_identity:digests",
            summary="train on a text dataset whose shards stay behind a URL",
            default_metrics=(
                "num_documents",
                "num_bytes",
                "num_train_tokens",
                "num_validation_tokens",
                "vocabulary_size",
            ),
        ),
        StageKind(
            name="train.fsdp",
            version=1,
            parameters=parameters.TrainFsdpParameters,
            run="pipeline.stages.train_fsdp:run",
            outputs={"checkpoint": "checkpoint"},
            framework=Framework.TORCH,
            sources="pipeline.stages.model_identity:digests",
            summary="train a torch model with FSDP2 on Ray Train workers",
            gang=True,
            delegates=True,
            auto_gpus=1.0,
            default_metrics=(
                "train_loss",
                "validation_loss",
                "initial_validation_loss",
                "validation_loss_change",
                "validation_accuracy",
                "ema_validation_loss",
                "ema_validation_accuracy",
                "tokens_per_second",
                "examples_per_second",
                "num_parameters",
                "num_tokens",
                "num_examples",
                "steps",
                "resumed_from_step",
            ),
        ),
        StageKind(
            name="import.checkpoint",
            version=2,
            parameters=parameters.ImportCheckpointParameters,
            run="pipeline.stages.import_checkpoint:run",
            outputs={"checkpoint": "checkpoint"},
            framework=Framework.BOTH,
            sources="pipeline.stages.checkpoint_identity:digests",
            summary="bring a checkpoint from elsewhere into the flow",
            default_metrics=("num_tensors", "num_bytes"),
        ),
        StageKind(
            name="convert.flax",
            version=2,
            parameters=parameters.ConvertFlaxParameters,
            run="pipeline.stages.convert_flax:run",
            outputs={"model": "flax-model"},
            framework=Framework.BOTH,
            summary="convert the torch checkpoint to Flax NNX parameters in Orbax",
            default_metrics=("num_source_tensors", "num_target_leaves", "num_parameters", "num_bytes"),
        ),
        StageKind(
            name="convert.torch",
            version=1,
            parameters=parameters.ConvertTorchParameters,
            run="pipeline.stages.convert_torch:run",
            outputs={"checkpoint": "checkpoint"},
            framework=Framework.BOTH,
            summary="convert the Flax model back to a checkpoint that transformers loads",
            default_metrics=("num_tensors", "num_bytes"),
        ),
        StageKind(
            name="convert.onnx",
            version=1,
            parameters=parameters.ConvertOnnxParameters,
            run="pipeline.stages.convert_onnx:run",
            outputs={"model": "onnx-model"},
            framework=Framework.BOTH,
            summary="export the torch model to ONNX and check it with onnxruntime",
            default_metrics=(
                "max_abs_difference",
                "max_rel_difference",
                "int8_max_abs_difference",
                "int8_max_rel_difference",
                "num_bytes",
            ),
        ),
        StageKind(
            name="evaluate.parity",
            version=2,
            parameters=parameters.EvaluateParityParameters,
            run="pipeline.stages.evaluate_parity:run",
            outputs={"report": "report"},
            framework=Framework.BOTH,
            summary="prove that torch and Flax compute the same",
            default_metrics=(
                "tensors_identical",
                "max_block_relative_error",
                "max_abs_output_difference",
                "max_rel_output_difference",
                "max_abs_logit_difference",
                "max_rel_logit_difference",
                "mean_kl",
                "max_kl",
                "top1_agreement",
                "topk_overlap",
                "greedy_match",
            ),
        ),
        StageKind(
            name="evaluate.loss",
            version=1,
            parameters=parameters.EvaluateLossParameters,
            run="pipeline.stages.evaluate_loss:run",
            outputs={"report": "report"},
            framework=Framework.JAX,
            summary="validation loss of the Flax model, with perplexity or accuracy",
            auto_gpus=0.25,
            default_metrics=("validation_loss", "perplexity", "num_tokens", "validation_accuracy", "num_examples"),
        ),
        StageKind(
            name="register.model",
            version=1,
            parameters=parameters.RegisterModelParameters,
            run="pipeline.stages.register_model:run",
            outputs={"registration": "registration"},
            framework=Framework.NONE,
            location=Location.DRIVER,
            verify="pipeline.stages.register_model:why_not_registered",
            summary="register a model version with its lineage and move the alias",
            default_metrics=("version",),
        ),
        StageKind(
            name="deploy.serve",
            version=1,
            parameters=parameters.DeployServeParameters,
            run="pipeline.stages.deploy_serve:run",
            outputs={"deployment": "deployment"},
            framework=Framework.NONE,
            verify="pipeline.cluster.endpoint:why_not_live",
            summary="serve the Flax model from jitted JAX actors on Ray Serve: text, embeddings or predictions",
            delegates=True,
            auto_gpus=0.25,
            default_metrics=("ready_seconds", "smoke_seconds", "smoke_tokens", "smoke_rows"),
        ),
        StageKind(
            name="python.call",
            version=1,
            parameters=parameters.PythonCallParameters,
            run="",
            outputs={},
            framework=Framework.NONE,
            sources="pipeline.stages.python_call:digests",
            summary="call a function of your own with the same contract",
        ),
    )
}


def outputs_of(kind: StageKind, given: Parameters) -> Mapping[str, str]:
    """Output name to artifact type of a stage of `kind`; `python.call` declares its own in its parameters."""
    if isinstance(given, parameters.PythonCallParameters):
        return dict.fromkeys(given.outputs, "files")
    return kind.outputs
