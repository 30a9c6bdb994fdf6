"""The bare side of `pipeline bench train`: FSDP2 by hand.

Owns the loop that a careful person writes: the same model, initial weights, rows, sharding, optimizer, schedule and
clipping as ours, its loss over all ranks now and then, and nothing else. Also what the peers share with it, so that
they differ in their framework alone. The one decision: ranks find each other as torchrun lets them, by the environment.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline.training.config import BatchPlan, plan_batch
from pipeline.training.session import TrainJob
from pipeline.training.tasks.model import blocks_of, build_model, model_config
from pipeline.training.updates.schedule import learning_rate
from pipeline.training.worker import WorkerContext


class Recipe:
    """What every side trains, in plain torch."""

    def __init__(self, worker: WorkerContext, job: TrainJob) -> None:
        """Build the model with our initial weights, and open the rows."""
        assert isinstance(job.config.model, Mapping)
        self.config = job.config
        self.worker = worker
        self._dataset = job.open_dataset()
        self.plan: BatchPlan = plan_batch(
            job.config, sequence_length=self._dataset.sequence_length, world_size=worker.world_size
        )
        self.model: nn.Module = build_model(model_config(job.config.model), seed=job.config.seed).train()

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW, fused, with weight decay on matrices."""
        config, parameters = self.config, list(model.parameters())
        groups = [
            {"params": [item for item in parameters if item.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [item for item in parameters if item.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)

    def schedule(self, optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
        """The same learning rates as ours."""
        peak = self.config.learning_rate
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, self.config) / peak)

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of this rank's passes, int64 [B, T] each."""
        rows = self._dataset.train_rows(
            step,
            rows_per_step=self.plan.rows_per_step,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
            seed=self.config.seed,
        )
        tokens_BS = torch.from_numpy(rows).to(dtype=torch.int64)
        return [(chunk[:, :-1], chunk[:, 1:]) for chunk in tokens_BS.split(self.plan.rows_per_micro_batch)]

    def loss(self, model: nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """This pass's part of the mean over the rank's tokens, float32 []."""
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        mean = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.reshape(-1))
        return mean / self.plan.accumulation

    def looks_at(self, done: int, *, last: int) -> bool:
        """True where the loss of the step is looked at: the first, every `log_every_steps`, and the last asked for."""
        return done in (1, last) or done % self.config.log_every_steps == 0

    def over_ranks(self, loss: torch.Tensor) -> float:
        """Mean of a loss over all ranks."""
        total = loss.double()
        dist.all_reduce(total)
        return float(total) / self.worker.world_size


class BareLoop:
    """See `pipeline.diagnostics.bench_train_gang.Loop`."""

    def __init__(self, recipe: Recipe) -> None:
        """Shard every block, then the rest."""
        self._recipe = recipe
        self._model = recipe.model
        mesh = init_device_mesh(recipe.worker.device, (recipe.worker.world_size,), mesh_dim_names=("shard",))
        for block in blocks_of(self._model):
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = recipe.optimizer(self._model)
        self._schedule = recipe.schedule(self._optimizer)
        self._taken = 0

    def advance(self, steps: int) -> dict[int, float]:
        """Take optimizer steps."""
        recipe, losses, last = self._recipe, {}, self._taken + steps
        while self._taken < last:
            total = torch.zeros(())
            for inputs_BT, targets_BT in recipe.micro_batches(self._taken):
                loss = recipe.loss(self._model, inputs_BT, targets_BT)
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), recipe.config.max_gradient_norm)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self._taken += 1
            if recipe.looks_at(self._taken, last=last):
                losses[self._taken] = recipe.over_ranks(total)
        return losses

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


@contextmanager
def as_under_torchrun(worker: WorkerContext) -> Iterator[None]:
    """Threads, environment and process group of a rank that torchrun started."""
    assert worker.store_address is not None
    torch.set_num_threads(worker.num_threads or 1)
    address, _, port = worker.store_address.partition(":")
    rank, world = str(worker.rank), str(worker.world_size)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def enter(worker: WorkerContext, job: TrainJob) -> Iterator[BareLoop]:
    """The loop of one rank."""
    with as_under_torchrun(worker):
        yield BareLoop(Recipe(worker, job))
