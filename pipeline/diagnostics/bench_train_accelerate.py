"""Hugging Face Accelerate's side of `pipeline bench train`.

Owns the loop that its documentation shows for FSDP2. The one decision: Accelerate offers FSDP on accelerators alone, so
on a CPU its distributed type is set past that check; everything after it is its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

from pipeline.diagnostics.bench_train_bare import Recipe, as_under_torchrun
from pipeline.training.session import TrainJob
from pipeline.training.tasks.model import blocks_of
from pipeline.training.worker import WorkerContext


class AccelerateLoop:
    """See `pipeline.diagnostics.bench_train_gang.Loop`."""

    def __init__(self, recipe: Recipe) -> None:
        """Prepare model and optimizer."""
        self._recipe = recipe
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(blocks_of(recipe.model)[0]).__name__],
            cpu_ram_efficient_loading=False,
        )
        self._accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            gradient_accumulation_steps=recipe.plan.accumulation,
            step_scheduler_with_optimizer=False,
        )
        state = self._accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self._model, self._optimizer = self._accelerator.prepare(recipe.model, recipe.optimizer(recipe.model))
        self._schedule = recipe.schedule(self._optimizer.optimizer)
        self._taken = 0

    def advance(self, steps: int) -> dict[int, float]:
        """Take optimizer steps."""
        recipe, accelerator, losses, last = self._recipe, self._accelerator, {}, self._taken + steps
        while self._taken < last:
            total = torch.zeros(())
            for inputs_BT, targets_BT in recipe.micro_batches(self._taken):
                with accelerator.accumulate(self._model):
                    # Accelerate divides by the passes of a step itself.
                    loss = recipe.loss(self._model, inputs_BT, targets_BT)
                    accelerator.backward(loss * recipe.plan.accumulation)
                    total += loss.detach()
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(self._model.parameters(), recipe.config.max_gradient_norm)
                    self._optimizer.step()
                    self._optimizer.zero_grad()
            self._schedule.step()
            self._taken += 1
            if recipe.looks_at(self._taken, last=last):
                losses[self._taken] = recipe.over_ranks(total)
        return losses

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._accelerator.wait_for_everyone()


@contextmanager
def enter(worker: WorkerContext, job: TrainJob) -> Iterator[AccelerateLoop]:
    """The loop of one rank."""
    with as_under_torchrun(worker):
        yield AccelerateLoop(Recipe(worker, job))
