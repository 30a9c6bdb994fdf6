"""What an exception of a rank means, and the note of the first one that cannot be mended.

Owns classification and the fatal note in the workspace. Knows nothing of Ray. The one decision: losing contact with a
peer is infrastructure (the peer's own error says why), running out of memory too; anything else a rank raises is the
user's, and repeating it would only repeat it.
"""

import json
import traceback

import torch.distributed as dist

from pipeline import errors
from pipeline.artifacts.store import Store
from pipeline.errors import ClusterError, PipelineError, StageError

_MIXED = "mixed torch.Tensor and DTensor"
_LOST_CONTACT = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Socket Timeout")


class LostContactError(ClusterError):
    """A rank could not reach the others; another rank's error says why."""


def as_pipeline_error(error: BaseException, *, rank: int) -> PipelineError:
    """The error a user sees for what a rank raised."""
    if isinstance(error, PipelineError):
        return error
    text = str(error)
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in _LOST_CONTACT)
    ):
        return LostContactError(f"rank {rank} lost contact with the other ranks: {text.splitlines()[0]}")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ClusterError(
            f"rank {rank} is out of memory: {text.splitlines()[0] if text else type(error).__name__}",
            hint="lower `micro_batch_sequences` (the global batch stays), or set `activation_checkpointing: full`",
        )
    hint = ""
    if _MIXED in text:
        hint = (
            "FSDP gathers a block's parameters when the block is called; the module seems to use a parameter of a "
            "child of a ModuleList or Sequential without calling that child"
        )
    whole = f"rank {rank}: {type(error).__name__}: {text}\n{''.join(traceback.format_exception(error))}"
    return StageError(whole, hint=hint)


def record_fatal(store: Store, launch_id: str, error: PipelineError) -> None:
    """Note an error that no restart can mend; the first one stays."""
    fields = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    store.create(_key(launch_id), json.dumps(fields).encode())


def read_fatal(store: Store, launch_id: str) -> PipelineError | None:
    """The noted error, as it was raised, or None."""
    data = store.read(_key(launch_id))
    if data is None:
        return None
    fields = json.loads(data)
    kind: type[PipelineError] = getattr(errors, fields["type"])
    return kind(fields["message"], hint=fields["hint"])


def _key(launch_id: str) -> str:
    return f"launches/{launch_id}/fatal.json"
