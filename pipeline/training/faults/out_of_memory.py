"""A rank that runs out of memory.

Owns what is said about it, and the note that makes the next start cut its batches smaller.
Knows nothing of batches beyond their number of rows. The one decision: the other ranks are in the middle of collectives
that nobody can leave, so a gang does not shrink its batches where it stands; the executor ends it at once, and the next
start reads the note. The global batch, and so the training, stays the same.
"""

import json
import resource
import sys

import torch

from pipeline.artifacts.store import Store
from pipeline.errors import ClusterError, PipelineError, StageError
from pipeline.training.worker import WorkerContext

_NOTES = "out-of-memory"
_MIB = 2**20


def peak_bytes(worker: WorkerContext) -> int:
    """The most memory this rank has held: allocated on its GPU, or resident in its process."""
    if worker.device == "cuda":
        return int(torch.cuda.max_memory_allocated(worker.torch_device))
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes * 1024


def memory_error(
    error: BaseException, *, worker: WorkerContext, rows: int, next_rows: int | None, state_bytes: int
) -> PipelineError:
    """What a user sees.

    Args:
        error: what the allocator raised.
        worker: the rank it was raised on.
        rows: of a micro-batch.
        next_rows: of a micro-batch in the next start; None where it would be no smaller, so that no start is worth it.
        state_bytes: parameters, gradients and optimizer state of a rank by arithmetic.
    """
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = (
        f"rank {worker.rank} of {worker.world_size} is out of memory with micro-batches of {rows} rows: {first_line} "
        f"(peak {peak_bytes(worker) / _MIB:,.0f} MiB; parameters, gradients and optimizer state are "
        f"at least {state_bytes / _MIB:,.1f} MiB of that, activations and working copies the rest)"
    )
    if next_rows is not None:
        return ClusterError(
            text, hint=f"the next start takes micro-batches of {next_rows} rows; the global batch stays"
        )
    return StageError(
        text,
        hint="lower `micro_batch_sequences` (the global batch stays), set `activation_checkpointing: full`, or allow "
        "`faults: {out_of_memory: smaller_micro_batch}`",
    )


def note_smaller(store: Store, *, asked_rows: int, rows: int) -> None:
    """Let later starts that ask for `asked_rows` use at most `rows`."""
    store.create(_key(asked_rows, rows), json.dumps({"rows": rows}).encode())


def noted_rows(store: Store, *, asked_rows: int) -> int:
    """Rows of a micro-batch where the flow asks for `asked_rows`: as asked, or what earlier starts came down to."""
    noted = [int(name.removesuffix(".json")) for name in store.list(f"{_NOTES}/{asked_rows}")]
    return min(noted, default=asked_rows)


def rows_were_cut(store: Store, *, asked_rows: int) -> bool:
    """True where a start of this training ran out of memory, and later ones took its batches in more passes."""
    return noted_rows(store, asked_rows=asked_rows) < asked_rows


def _key(asked_rows: int, rows: int) -> str:
    return f"{_NOTES}/{asked_rows}/{rows}.json"
