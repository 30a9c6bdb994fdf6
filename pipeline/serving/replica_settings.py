"""What a replica is told when it is made.

Owns the value that travels from the deploying process to the replica. Loads no framework. The one decision: a replica
is fully described by this value, so the same value brings the same replica back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    slots: int
    context: int | None
    """Longest text in tokens; the model's own limit where it is None."""
    prefill_chunk_tokens: int
    decode_steps: int
    prefix_cache_tokens: int = 0
    """Granularity at which prompts reuse what is in the cache; 0 reuses nothing."""
    deterministic: bool = False
    device: str = "auto"
    dtype: str = "auto"
    max_batch_rows: int = 32
    """Of a model that embeds or predicts."""
    batch_wait_seconds: float = 0.003
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a model leaves open, by name."""
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
