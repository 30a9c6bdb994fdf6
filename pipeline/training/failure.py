"""What an exception of a rank means, which of several is the cause, and the note of one that cannot be mended.

Owns classification, the order of errors, and the fatal note in the workspace. Knows nothing of Ray. The one decision:
losing contact with a peer is infrastructure (the peer's own error says why), running out of memory too; anything else a
rank raises is the user's, and repeating it would only repeat it.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline import errors
from pipeline.artifacts.store import Store
from pipeline.errors import ClusterError, PipelineError, StageError

_MIXED = "mixed torch.Tensor and DTensor"
_LOST_CONTACT = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Socket Timeout")


_CPU_ALLOCATOR = "DefaultCPUAllocator"


class LostContactError(ClusterError):
    """A rank could not reach the others; another rank's error says why."""


class StalledError(ClusterError):
    """A rank made no progress in work of its own, and ended itself."""


class WaitingError(StalledError):
    """A rank made no progress in work that it does together with others; another rank may be why."""


_OWN = {kind.__name__: kind for kind in (LostContactError, StalledError, WaitingError)}
_CONSEQUENCES = (WaitingError, LostContactError)
"""The likelier cause first: a rank that only waits for others loses contact before its watchdog ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """How one rank failed."""

    rank: int
    error: PipelineError
    at: float
    """Seconds since the epoch, by the rank's own clock."""


def is_consequence(error: BaseException) -> bool:
    """True where another rank's error may be the reason."""
    return isinstance(error, _CONSEQUENCES)


def _remoteness(error: PipelineError) -> int:
    """0 for a cause, more for what is the less likely one."""
    return next((place for place, kind in enumerate(_CONSEQUENCES, start=1) if isinstance(error, kind)), 0)


def first_failure(failures: Sequence[RankFailure]) -> PipelineError:
    """The error of the rank that failed first, with those of the others folded into a line each.

    What may be a consequence comes after what is none, whenever it was raised: a rank that lost contact with a dead one
    is often heard first.
    """
    cause, *others = sorted(failures, key=lambda item: (_remoteness(item.error), item.at))
    lines = {
        f"rank {item.rank}: {type(item.error).__name__}: {item.error.message.splitlines()[0]}"
        for item in others
        if item.error.message != cause.error.message
    }
    if not lines:
        return cause.error
    folded = f"{cause.error.message}\nafter that:\n" + "\n".join(f"  {line}" for line in sorted(lines))
    return type(cause.error)(folded, hint=cause.error.hint)


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's error, Python's, and that of torch's CPU allocator, which is a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def as_pipeline_error(error: BaseException, *, rank: int) -> PipelineError:
    """The error a user sees for what a rank raised."""
    if isinstance(error, PipelineError):
        return error
    text = str(error)
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in _LOST_CONTACT)
    ):
        return LostContactError(f"rank {rank} lost contact with the other ranks: {text.splitlines()[0]}")
    if is_out_of_memory(error):
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


def record_failure(store: Store, launch_id: str, *, start: str, failure: RankFailure) -> None:
    """Note how a rank failed, for an executor that cannot hear it: its process may be about to end itself.

    Args:
        store: the workspace.
        launch_id: of the launch.
        start: which start of the launch's gang.
        failure: what happened.
    """
    fields = _fields(failure.error) | {"at": failure.at}
    store.write(f"{_failures(launch_id)}/{start}/{failure.rank}.json", json.dumps(fields).encode())


def read_failures(store: Store, launch_id: str, *, start: str) -> list[RankFailure]:
    """What ranks of a start noted; those of an earlier start say nothing of why this one failed."""
    notes = f"{_failures(launch_id)}/{start}"
    found = []
    for name in store.list(notes):
        data = store.read(f"{notes}/{name}")
        if data is not None:
            fields = json.loads(data)
            rank = int(name.removesuffix(".json"))
            found.append(RankFailure(rank=rank, error=_error_of(fields), at=fields["at"]))
    return found


def record_fatal(store: Store, launch_id: str, error: PipelineError) -> None:
    """Note an error that no restart can mend; the first one stays."""
    store.create(_key(launch_id), json.dumps(_fields(error)).encode())


def read_fatal(store: Store, launch_id: str) -> PipelineError | None:
    """The noted error, as it was raised, or None."""
    data = store.read(_key(launch_id))
    return None if data is None else _error_of(json.loads(data))


def _fields(error: PipelineError) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


def _error_of(fields: Mapping[str, Any]) -> PipelineError:
    kind = _OWN.get(fields["type"]) or getattr(errors, fields["type"])
    error: PipelineError = kind(fields["message"], hint=fields["hint"])
    return error


def _failures(launch_id: str) -> str:
    return f"launches/{launch_id}/failures"


def _key(launch_id: str) -> str:
    return f"launches/{launch_id}/fatal.json"
