"""What a replica needs in memory, and whether that is there.

Owns the arithmetic. Pure, without jax: a deployment that cannot fit is refused before a process is started for it. The
one decision: the message shows every term, so that a reader sees which setting to lower.
"""

from dataclasses import dataclass

from pipeline.cluster.ledger import gib
from pipeline.models.decoders.config import DecoderConfig
from pipeline.serving.accelerator.weight_bytes import BYTES_OF, compute_dtype, weights_bytes

RUNTIME_BYTES = 512 * 2**20
"""Of the process itself: interpreter, jax and compiled code; 350 to 450 MiB measured."""
LOADING_COPIES = 2
"""Stored and placed weights exist together while a replica loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Bytes of one replica."""

    weights: int
    cache: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        """At the moment of loading."""
        return LOADING_COPIES * self.weights + self.cache + self.runtime


def memory_need(config: DecoderConfig, *, dtype: str, slots: int, context: int, device: str) -> MemoryNeed:
    """What a replica with these settings takes."""
    size = BYTES_OF[compute_dtype(dtype, device=device)]
    return MemoryNeed(
        weights=weights_bytes(config, dtype=dtype, device=device),
        cache=config.num_cache_numbers(slots=slots, positions=context) * size,
    )


def why_too_big(need: MemoryNeed, *, available: int, replicas: int, slots: int, context: int) -> str | None:
    """The arithmetic in words where the replicas do not fit into `available` bytes, else None."""
    if need.total * replicas <= available:
        return None
    return (
        f"{replicas} replica(s) need {gib(need.total * replicas)}: each {LOADING_COPIES} x {gib(need.weights)} of "
        f"weights while loading + {gib(need.cache)} of key-value cache ({slots} slots x {context} tokens) + "
        f"{gib(need.runtime)} for the process; {gib(available)} are available"
    )


def why_weights_too_big(num_bytes: int, *, available: int, replicas: int) -> str | None:
    """As `why_too_big`, for a model that keeps nothing but its weights."""
    total = (LOADING_COPIES * num_bytes + RUNTIME_BYTES) * replicas
    if total <= available:
        return None
    return (
        f"{replicas} replica(s) need {gib(total)}: each {LOADING_COPIES} x {gib(num_bytes)} of weights while loading "
        f"+ {gib(RUNTIME_BYTES)} for the process; {gib(available)} are available"
    )
