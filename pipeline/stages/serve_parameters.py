"""The parameters of `deploy.serve`.

Owns their names, types, defaults, units and ranges. Knows nothing of how a model is served. The one decision: where a
replica runs and who may ask it cannot change what it answers, and stays out of the fingerprint.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.stages.parameter_fields import NOT_IDENTITY, Device, Parameters
from pipeline.stages.reference import AnyInput, FlaxModelInput
from pipeline.stages.traffic_parameters import AutoscalingParameters, CanaryParameters, ShadowParameters


def _is_reference(value: str) -> str:
    kind, _, place = value.partition(":")
    if kind not in ("env", "file") or not place:
        # Without the value, which may be the secret itself.
        raise ValueError("must be env:NAME or file:PATH, where the secret is, and never the secret itself")
    return value


SecretReference = Annotated[str, AfterValidator(_is_reference)]
"""Where a secret is: `env:NAME` or `file:PATH`."""


class ServeMesh(Parameters):
    """`mesh` of `deploy.serve`: the devices of one replica."""

    tensor: int = Field(default=1, ge=1, le=64, description="Devices that hold one copy of the model together.")
    data: int = Field(default=1, ge=1, le=64, description="Copies of the model, each with its share of the slots.")
    hosts: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Machines over which the devices are spread, as many on each, one process a machine.",
    )


class DeployServeParameters(Parameters):
    """`deploy.serve`: a Ray Serve deployment of jitted JAX actors.

    A decoder answers `/v1/completions`, a text encoder `/v1/embeddings`, any other model `/v1/predict`.
    """

    model: FlaxModelInput = Field(description="What is served.")
    registration: AnyInput | None = Field(
        None, description="Wait for this registration; what is served says its version."
    )
    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*$", description="Name of the deployment and of the model in requests."
    )
    replicas: int = Field(1, ge=1, description="Number of replicas.")
    slots: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Completions: requests decoded together in one replica; as many as memory allows when absent, at "
        "most 8 on a CPU and 64 on a GPU.",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=16,
        description="Prompt plus completion, or the longest text that is embedded; when absent the model's own limit, "
        "or as much of it as memory allows.",
    )
    prefill_chunk_tokens: int = Field(
        64, ge=8, description="Completions: prompt tokens processed between two decode steps."
    )
    decode_steps: int = Field(4, ge=1, le=64, description="Completions: decode steps inside one jitted call.")
    prefix_cache_tokens: int = Field(
        16,
        ge=0,
        description="Completions: a prompt's beginning that is in the cache already is reused in multiples of so many "
        "tokens; 0 computes every prompt.",
    )
    deterministic: bool = Field(
        False,
        description="Completions: the same tokens, bit for bit, alone, in a full batch and after a prefix hit; each "
        "step then computes all slots and the whole context.",
    )
    max_logprobs: int = Field(
        5,
        ge=0,
        le=20,
        description="Completions: alternatives a token whose log-probabilities a request may ask for; 0 computes none, "
        "and spares their compile.",
    )
    max_batch_rows: int = Field(
        32, ge=1, le=4096, description="Embeddings and predictions: rows of all requests in one forward pass."
    )
    batch_wait_seconds: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Embeddings and predictions: how long a lone row waits for others where the device is free. While "
        "it computes, the next pass gathers without it.",
    )
    dimensions: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Predictions: sizes, by name, that the model leaves open beside the number of rows.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto",
        description="auto is float32 on a CPU and bfloat16 on a GPU (int8 where only that fits), and says why. int8 "
        "quantizes the projections of a decoder; the rest is computed in float32 on a CPU, in bfloat16 on a GPU.",
    )
    min_tokens_per_second: float = Field(
        0.5,
        ge=0.0,
        description="Refuse a model that memory bandwidth alone holds below so many tokens (of other models: forward "
        "passes) a second.",
    )
    mesh: ServeMesh = Field(
        ServeMesh(),
        description="Completions: the devices of one replica. On GPUs, `resources: {gpus: N}` are those of one host.",
    )
    isolation: Literal["auto", "shared", "process"] = Field(
        "auto",
        description="shared serves this model in one process with others, process in one of its own; auto shares where "
        "the cluster has one GPU and several deployments of the flow use it, and says why.",
        json_schema_extra=NOT_IDENTITY,
    )
    device: Device = Field("auto", description="Where jax runs.", json_schema_extra=NOT_IDENTITY)
    api_keys: SecretReference | None = Field(
        None,
        description="Where the keys are that may ask: env:NAME or file:PATH, never a key itself; everybody may ask "
        "when absent. Only their sha256 leaves the stage.",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Of each key, or of all clients where there are no keys, in each replica."
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="As that: prompt and completion together; rows of a prediction."
    )
    max_request_bytes: int | None = Field(
        None, ge=1024, description="Longest body of a request; 4 MiB, for predictions 32 MiB, when absent."
    )
    port: int | None = Field(
        None,
        ge=1024,
        le=65535,
        description="HTTP port; a free one from 8000 when absent.",
        json_schema_extra=NOT_IDENTITY,
    )
    drain_timeout_seconds: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="How long a replica that leaves, or an engine that is replaced, finishes accepted requests.",
        json_schema_extra=NOT_IDENTITY,
    )
    canary: CanaryParameters | None = Field(
        None,
        description="Before it takes over, the new version answers a share of the requests beside the one that serves, "
        "and is taken down where the conditions do not hold.",
        json_schema_extra=NOT_IDENTITY,
    )
    shadow: bool | ShadowParameters = Field(
        False,
        description="Before it takes over (and before a canary), the new version gets copies of the requests, and its "
        "answers are compared.",
        json_schema_extra=NOT_IDENTITY,
    )
    autoscaling: AutoscalingParameters | None = Field(
        None,
        description="As many replicas as requests in flight ask for, in place of `replicas`.",
        json_schema_extra=NOT_IDENTITY,
    )
    smoke_prompt: str = Field("def main():\n", description="A request with it must come back before the stage is done.")
    ready_timeout_seconds: float = Field(
        180.0, gt=0, description="Until every replica has compiled and answers.", json_schema_extra=NOT_IDENTITY
    )
