"""What a replica's process is told.

Owns the values that travel from the deploying process to the replica. Loads no framework. The one decision: a process
is fully described by one declarative value, Ray Serve's `user_config`, so the same value brings the same process back,
and a new value says what it should become, not how.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pipeline.errors import ParameterError
from pipeline.models.decoders.partition import MeshSize


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """One version of one deployment."""

    name: str
    model_path: str
    """A model directory that every node can read."""
    digest: str
    """Of the model artifact; `/health` shows it."""
    version: str
    deployment_id: str
    """Unique for each time something is deployed; tells an old replica's answer from a new one's."""
    slots: int | None
    """As many as fit where it is None."""
    context: int | None
    """Longest text in tokens; the longest that fits, at most the model's own limit, where it is None."""
    prefill_chunk_tokens: int
    decode_steps: int
    prefix_cache_tokens: int = 0
    """Granularity at which prompts reuse what is in the cache; 0 reuses nothing."""
    deterministic: bool = False
    max_logprobs: int = 5
    """Alternatives a token that a request may ask for; 0 compiles none."""
    device: str = "auto"
    dtype: str = "auto"
    max_batch_rows: int = 32
    """Of a model that embeds or predicts."""
    batch_wait_seconds: float = 0.0
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a model leaves open, by name."""
    min_tokens_per_second: float = 0.0
    """Refused below, by the bound that memory bandwidth sets."""
    memory_part: float = 1.0
    """Of the process's memory on its device; less where it serves several models."""
    mesh_tensor: int = 1
    """Devices that hold one copy of the model."""
    mesh_data: int = 1
    """Copies of the model in one replica."""
    mesh_hosts: int = 1
    """Machines over which one copy is spread."""
    compilation_cache: str | None = None
    """Directory of jax's persistent cache, or None."""
    api_key_digests: tuple[str, ...] = ()
    """sha256 of each key that may ask; never a key. Without any, everybody may."""
    requests_per_minute: int | None = None
    """Of each key, in each replica."""
    tokens_per_minute: int | None = None
    """As that, prompt and completion together."""
    max_request_bytes: int | None = None
    """Of a body; the endpoint's own limit where it is None."""
    smoke_key_digest: str = ""
    """sha256 of a key that only the process that deploys has, for its first request; where keys are needed."""

    @property
    def mesh(self) -> MeshSize:
        """The devices of one replica."""
        return MeshSize(tensor=self.mesh_tensor, data=self.mesh_data, hosts=self.mesh_hosts)

    @property
    def version_label(self) -> str:
        """The version and the beginning of its digest; answers carry it as `system_fingerprint`."""
        return f"{self.version}-{self.digest[:12]}"


IDENTITY_FIELDS = ("model_path", "digest", "version", "deployment_id")
ACCESS_FIELDS = ("api_key_digests", "smoke_key_digest", "requests_per_minute", "tokens_per_minute", "max_request_bytes")
"""Both may differ between two versions that run the same executables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """Of the actors; another `identity` needs new ones."""

    identity: str
    """Of code, environment and resources; behind a dot, what tells two generations of it apart."""
    isolation: str
    """`process` or `shared`: may models of other shapes run beside each other in it."""
    cpus: float
    gpus: float
    replicas: int
    drain_seconds: float
    environment: Mapping[str, str]
    autoscaling: Mapping[str, Any] | None = None
    """Of Ray Serve, by its own names; `replicas` is then the least number that is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """Everything that the processes of one Ray Serve application are told."""

    models: tuple[ReplicaSettings, ...]
    process: ProcessSettings | None = None
    """None outside Ray Serve."""
    traffic: Mapping[str, Any] = field(default_factory=dict)
    """Where requests go beside this process: canary and shadow."""

    def model(self, name: str) -> ReplicaSettings | None:
        """The settings of the model called `name`."""
        return next((settings for settings in self.models if settings.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """What `read_config` reads again."""
        return {
            "models": [asdict(settings) for settings in self.models],
            "process": None if self.process is None else asdict(self.process),
            "traffic": dict(self.traffic),
        }


def read_config(given: Mapping[str, Any]) -> ReplicaConfig:
    """The values behind a `user_config`.

    Raises:
        ParameterError: it is no such value, or two models have one name.
    """
    try:
        models = tuple(read_settings(one) for one in given["models"])
        process = given.get("process")
        config = ReplicaConfig(
            models=models,
            process=None if process is None else ProcessSettings(**process),
            traffic=dict(given.get("traffic") or {}),
        )
    except (KeyError, TypeError) as error:
        raise ParameterError(
            f"the configuration of a replica cannot be read: {error}",
            hint="it was written by another version of this package; deploy the model again",
        ) from error
    names = [settings.name for settings in models]
    if len(set(names)) != len(names) or not names:
        raise ParameterError(f"the models of a replica are {', '.join(names) or 'none'}; each needs a name of its own")
    return config


def read_settings(given: Mapping[str, Any]) -> ReplicaSettings:
    """One model's settings from JSON.

    Raises:
        TypeError: a field is missing or unknown.
    """
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return ReplicaSettings(**values)


def executables_of(settings: ReplicaSettings) -> dict[str, Any]:
    """What decides which executables a version runs, beside the shapes of its model."""
    return {
        item.name: getattr(settings, item.name)
        for item in fields(ReplicaSettings)
        if item.name not in (*IDENTITY_FIELDS, *ACCESS_FIELDS)
    }


def same_executables(one: ReplicaSettings, other: ReplicaSettings) -> bool:
    """True where the two differ at most in which parameters they are given, and who may ask."""
    return executables_of(one) == executables_of(other)
