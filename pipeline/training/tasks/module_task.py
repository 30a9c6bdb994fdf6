"""A module of the user's own and a dataset of arrays.

Owns its losses and its blocks. Knows nothing of steps. The one decision: a row is one example and a unit too; where an
example has several targets, its loss is their mean.

Shapes: B rows, K classes; a target is [B, ...], logits are [B, K, ...].
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from pipeline.errors import ParameterError
from pipeline.models.module_file import MODULE_FILE
from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.tasks.buffers import agree_on_buffers
from pipeline.training.tasks.documents import check_documents
from pipeline.training.tasks.loss import held_out_rows
from pipeline.training.tasks.module_factory import build_module, module_file, output_of
from pipeline.training.tasks.rows import ArrayRows, Examples
from pipeline.training.tasks.task import Unit
from pipeline.training.worker import WorkerContext


class ModuleTask:
    """Classes or values from arrays; see `Task`."""

    unit: Unit = "example"

    def __init__(self, config: TrainConfig, dataset: ArrayRows, *, project_root: str) -> None:
        """Take what was checked by `check_module`.

        Raises:
            ParameterError: the config speaks of documents.
        """
        check_documents(config)
        assert isinstance(config.model, str)
        self._config = config
        self._factory = config.model
        self._dataset = dataset
        self._project_root = project_root

    @property
    def data_digest(self) -> str:
        """Of the dataset."""
        return self._dataset.digest

    @property
    def data_wait(self) -> str | None:
        """Shards that are being fetched."""
        return self._dataset.waiting_for

    @property
    def companions(self) -> Mapping[str, bytes]:
        """`module.json`."""
        described = module_file(self._factory, arguments=self._config.model_arguments, dataset=self._dataset)
        return {MODULE_FILE: described.text().encode()}

    def build(self, *, seed: int) -> nn.Module:
        """What the factory makes."""
        return build_module(
            self._factory,
            arguments=self._config.model_arguments,
            project_root=self._project_root,
            seed=seed,
        )

    def build_empty(self, *, seed: int) -> nn.Module:
        """What the factory makes, with its values: what else it computes in its constructor is not known."""
        return self.build(seed=seed)

    def prepare(self, model: nn.Module, config: TrainConfig) -> None:
        """Nothing; the module recomputes what it wants to itself.

        Raises:
            ParameterError: the config asks for it.
        """
        check_supported(config)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Children of the outermost lists and sequences."""
        return module_blocks(model)

    def flops_per_unit(self, num_parameters: int) -> float | None:
        """Not known for a module that may do anything."""
        return None

    def rows(self, step: int, *, plan: BatchPlan, worker: WorkerContext, seed: int) -> Examples:
        """Every array of the rows."""
        return self._dataset.train_rows(
            step, rows_per_step=plan.rows_per_step, rank=worker.share.rank, world_size=worker.share.num_ranks, seed=seed
        )

    def num_units(self, rows: Examples) -> int | None:
        """Each row is one."""
        return None

    def step_rows(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, list[int]]:
        """See `Task.step_rows`."""
        return self._dataset.step_rows(step, rows_per_step=plan.rows_per_step, seed=seed)

    def epochs(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, float]:
        """`epoch`."""
        return self._dataset.epochs(step, rows_per_step=plan.rows_per_step, seed=seed)

    def loss_sum(self, model: nn.Module, rows: Examples, part: slice, worker: WorkerContext) -> torch.Tensor:
        """Sum over examples."""
        output, target = self._forward(model, {name: array[part] for name, array in rows.items()}, worker)
        return self._losses(output, target).sum()

    def settle(self, model: nn.Module, worker: WorkerContext) -> None:
        """Buffers become equal on all ranks."""
        agree_on_buffers(model, worker)

    @torch.no_grad()
    def validate(
        self, model: nn.Module, worker: WorkerContext, *, max_rows: int, micro_batch_rows: int
    ) -> dict[str, float]:
        """`validation_loss`, and `validation_accuracy` where the target is a class."""
        padded, num_mine = held_out_rows(
            self._dataset.num_rows("validation"), worker, max_rows=max_rows, micro_batch_rows=micro_batch_rows
        )
        is_classes = self._dataset.num_classes is not None
        total = torch.zeros(3, dtype=torch.float64, device=worker.torch_device)
        model.eval()
        for first in range(0, len(padded), micro_batch_rows):
            rows = self._dataset.rows("validation", padded[first : first + micro_batch_rows])
            output, target = self._forward(model, rows, worker)
            num_real = max(0, min(micro_batch_rows, num_mine - first))
            total[0] += num_real
            total[1] += self._losses(output, target)[:num_real].double().sum()
            if is_classes:
                total[2] += _mean_by_row((output.argmax(dim=1) == target).float())[:num_real].double().sum()
        model.train()
        dist.all_reduce(total)
        count, loss, right = total.tolist()
        accuracy = {"validation_accuracy": right / count} if is_classes else {}
        return {"validation_loss": loss / count} | accuracy

    def _forward(self, model: nn.Module, rows: Examples, worker: WorkerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits or values in float32, and the target."""
        placed = {name: torch.from_numpy(array).to(worker.torch_device) for name, array in rows.items()}
        target = placed.pop(self._dataset.target)
        return output_of(self._factory, model(**placed)).float(), target

    def _losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of each example, float32 [B]."""
        if self._config.loss == "cross_entropy":
            return _mean_by_row(nn.functional.cross_entropy(output, target, reduction="none"))
        return _mean_by_row(nn.functional.mse_loss(output, target, reduction="none"))


def check_supported(config: TrainConfig) -> None:
    """Refuse what only transformers models have.

    Raises:
        ParameterError: `activation_checkpointing` is set.
    """
    if config.activation_checkpointing != "none":
        raise ParameterError(
            f"activation_checkpointing: {config.activation_checkpointing}: a second forward pass would count twice in "
            "running statistics of a module that is not known",
            hint="leave it out, and call torch.utils.checkpoint inside the module where it is safe",
        )


def module_blocks(model: nn.Module) -> list[nn.Module]:
    """Children with parameters of the outermost `ModuleList`s and `Sequential`s, in order.

    A child whose parameter is also used elsewhere stays with the root, because FSDP gathers a parameter in one group.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    shared = {key for key, count in owners.items() if count > 1}
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        inside |= {id(each) for each in module.modules()}
        for child in _children(module):
            parameters = list(child.parameters())
            if parameters and not any(id(parameter) in shared for parameter in parameters) and child not in blocks:
                blocks.append(child)
    return blocks


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Children, and those of children that are lists or dicts, for these have no forward of their own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child)
        else:
            yield child


def _mean_by_row(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).mean(dim=1) if values.ndim > 1 else values
