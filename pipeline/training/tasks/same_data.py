"""Every rank has the same data.

Owns that check. Knows nothing of rows. The one decision: which rows a rank takes, and how many steps there are, follows
from the dataset and the config alone, so ranks with one dataset never run out of rows at different steps; that they
have one is seen before the first step, and no rank ever waits for another that has nothing left.
"""

import torch
import torch.distributed as dist

from pipeline.errors import ParameterError
from pipeline.training.worker import WorkerContext

_BYTES = 8
"""Of a digest, as many as an int64 has."""


def check_same_data(digest: str, worker: WorkerContext) -> None:
    """Compare this rank's dataset with those of the others; all ranks call this together.

    Args:
        digest: of the dataset, hexadecimal.
        worker: this rank.

    Raises:
        ParameterError: they differ; on every rank, with all of them.
    """
    mine = int.from_bytes(bytes.fromhex(digest)[:_BYTES], signed=True)
    found = torch.zeros(worker.world_size, dtype=torch.int64, device=worker.torch_device)
    found[worker.rank] = mine
    dist.all_reduce(found)
    if len(set(found.tolist())) > 1:
        shown = ", ".join(
            f"rank {rank} {number.to_bytes(_BYTES, signed=True).hex()}" for rank, number in enumerate(found.tolist())
        )
        raise ParameterError(
            f"ranks have opened different datasets (digests of manifest.json: {shown})",
            hint="every host must see the same files; look for a stale copy of the dataset",
        )
