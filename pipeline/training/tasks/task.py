"""What the loop asks of a model and its data.

Owns the seam between the loop and what is trained: language models on tokens, modules of the user's own on arrays.
Knows nothing of sharding, steps or files. The one decision: a loss is a sum over the rows it was given that the loop
divides once by the units of all ranks and micro-batches, so neither accumulation nor the number of ranks changes the
gradient.

Shapes: B rows.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import nn

from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.worker import WorkerContext

Unit = Literal["token", "example"]


class Task(Protocol):
    """A model and the rows it learns from."""

    @property
    def unit(self) -> Unit:
        """What the loss is a mean over."""
        ...

    @property
    def data_digest(self) -> str:
        """sha256 of what the dataset holds, hexadecimal; the same on every rank."""
        ...

    @property
    def data_wait(self) -> str | None:
        """What is being fetched for the rows, in words; None where nothing is."""
        ...

    @property
    def companions(self) -> Mapping[str, bytes]:
        """Files that are kept beside every checkpoint, by name."""
        ...

    def build(self, *, seed: int) -> nn.Module:
        """The module with initial weights that depend on `seed` alone; the same on every rank."""
        ...

    def build_empty(self, *, seed: int) -> nn.Module:
        """The module for weights that are stored: parameters may be on the meta device, buffers have their values."""
        ...

    def prepare(self, model: nn.Module, config: TrainConfig) -> None:
        """Recompute activations as the config says, before sharding."""
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Submodules that become a group of FSDP each; their parameters are nowhere else."""
        ...

    def flops_per_unit(self, num_parameters: int) -> float | None:
        """FLOPs of forward and backward for one unit, or None where they are not known."""
        ...

    def rows(self, step: int, *, plan: BatchPlan, worker: WorkerContext, seed: int) -> Any:
        """What this rank trains on in optimizer step `step` (from 0), in memory of the host."""
        ...

    def num_units(self, rows: Any) -> int | None:
        """Units that the loss of `rows` is a sum over; None where it is as many for any rows of that number."""
        ...

    def step_rows(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, list[int]]:
        """Training rows of all ranks in step `step` (from 0), by the name of what they are rows of."""
        ...

    def epochs(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, float]:
        """Passes over the training rows after `step` steps, by the name of a metric."""
        ...

    def loss_sum(self, model: nn.Module, rows: Any, part: slice, worker: WorkerContext) -> torch.Tensor:
        """Sum of the loss over the units of `rows[part]`, float32 []; on the device."""
        ...

    def settle(self, model: nn.Module, worker: WorkerContext) -> None:
        """Called by all ranks after a step: make what is no parameter equal on all of them."""
        ...

    def validate(
        self, model: nn.Module, worker: WorkerContext, *, max_rows: int, micro_batch_rows: int
    ) -> dict[str, float]:
        """`validation_loss` and what else is measured, over up to `max_rows` held-out rows; the same on every rank."""
        ...
