"""Lightning Fabric's side of `pipeline bench train`.

Owns the loop that its documentation shows for FSDP2: `ModelParallelStrategy` with a function that calls `fully_shard`.
The one decision: the function shards as the bare loop does, so that what is measured is Fabric.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pipeline.diagnostics.bench_train_bare import Recipe, as_under_torchrun
from pipeline.training.session import TrainJob
from pipeline.training.tasks.model import blocks_of
from pipeline.training.worker import WorkerContext


class FabricLoop:
    """See `pipeline.diagnostics.bench_train_gang.Loop`."""

    def __init__(self, recipe: Recipe) -> None:
        """Set model and optimizer up."""
        self._recipe = recipe
        world_size = recipe.worker.world_size
        self._fabric = Fabric(
            accelerator="cpu",
            devices=world_size,
            strategy=ModelParallelStrategy(_shard, data_parallel_size=world_size, tensor_parallel_size=1),
        )
        self._fabric.launch()
        self._model = self._fabric.setup_module(recipe.model)
        self._inner = recipe.optimizer(self._model)
        self._optimizer = self._fabric.setup_optimizers(self._inner)
        self._schedule = recipe.schedule(self._inner)
        self._taken = 0

    def advance(self, steps: int) -> dict[int, float]:
        """Take optimizer steps."""
        recipe, fabric, losses, last = self._recipe, self._fabric, {}, self._taken + steps
        while self._taken < last:
            total = torch.zeros(())
            parts = recipe.micro_batches(self._taken)
            for number, (inputs_BT, targets_BT) in enumerate(parts, start=1):
                with fabric.no_backward_sync(self._model, enabled=number < len(parts)):
                    loss = recipe.loss(self._model, inputs_BT, targets_BT)
                    fabric.backward(loss)
                total += loss.detach()
            fabric.clip_gradients(self._model, self._optimizer, max_norm=recipe.config.max_gradient_norm)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self._taken += 1
            if recipe.looks_at(self._taken, last=last):
                losses[self._taken] = recipe.over_ranks(total)
        return losses

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._fabric.barrier()


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


@contextmanager
def enter(worker: WorkerContext, job: TrainJob) -> Iterator[FabricLoop]:
    """The loop of one rank."""
    with as_under_torchrun(worker):
        yield FabricLoop(Recipe(worker, job))
