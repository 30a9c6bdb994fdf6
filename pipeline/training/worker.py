"""Who a training process is: its rank, its device and how it meets the others.

Owns the value that every launcher gives the loop, and joining the process group. Knows nothing of launchers: Ray, a
plain spawner and torchrun all make the same `WorkerContext`. The one decision: the meeting point is a TCP store, and
every collective has a deadline.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from pipeline.training.device import check_device_present
from pipeline.training.host_memory import keep_freed_memory
from pipeline.training.rank_sources import ENVIRONMENT_STORE

COLLECTIVE_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShare:
    """Which rows a rank trains on, and which part of each."""

    rank: int
    num_ranks: int
    """Parts into which the rows of a step are dealt."""
    context_rank: int = 0
    num_context_ranks: int = 1
    """Parts into which each row is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """One rank of a training gang."""

    rank: int
    world_size: int
    local_rank: int
    device: Literal["cpu", "cuda"]
    device_reason: str
    """Why this device was chosen; recorded with the result."""
    store_address: str | None = None
    """`host:port` of rank 0's TCP store, `env://` where torchrun has made it, or None where the launcher has made the
    process group."""
    store: dist.Store | None = None
    """The gang's own part of that store, where pre-flight has opened it already."""
    num_threads: int | None = None
    """Threads of torch operators in this process; torch's own choice when None."""
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
    dealt: DataShare | None = None
    """This rank's share of the data, known once the mesh is; None before."""

    @property
    def share(self) -> DataShare:
        """This rank's share of the data; by its number where no axis of the mesh cuts the model."""
        return self.dealt or DataShare(rank=self.rank, num_ranks=self.world_size)

    @property
    def backend(self) -> str:
        """What `init_process_group` is given. On CUDA, gloo serves the objects that live on the CPU."""
        return backend_of(self.device)

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank's tensors."""
        return torch.device(self.device, self.local_rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone reports and commits."""
        return self.rank == 0


def backend_of(device: Literal["cpu", "cuda"]) -> str:
    """Backend of the process group on a device."""
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"


@contextlib.contextmanager
def joined(worker: WorkerContext) -> Iterator[None]:
    """Be a member of the process group; leaves it at the end if it was made here.

    Raises:
        ParameterError: the chosen device is not there.
    """
    if worker.num_threads is not None:
        torch.set_num_threads(worker.num_threads)
    keep_freed_memory()
    check_device_present(worker.device)
    if worker.device == "cuda":
        torch.cuda.set_device(worker.torch_device)
    if worker.store_address is None:
        yield
        return
    address = worker.store_address
    dist.init_process_group(
        worker.backend,
        init_method=None if worker.store else address if address == ENVIRONMENT_STORE else f"tcp://{address}",
        store=worker.store,
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=worker.collective_timeout_seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
