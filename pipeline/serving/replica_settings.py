"""What a replica is told when it is made.

Owns the value that travels from the deploying process to the replica. Loads no framework. The one decision: a replica
is fully described by this value, so the same value brings the same replica back.
"""

from dataclasses import dataclass


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
    context: int
    prefill_chunk_tokens: int
    decode_steps: int
    device: str = "auto"
    dtype: str = "auto"
    compilation_cache: str | None = None
    """Directory of jax's persistent cache, or None."""
