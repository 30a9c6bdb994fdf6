"""Blocks that ranks hold one after the other.

Owns how a model is cut into stages, the schedules, and what is added up between stages. Knows nothing of FSDP plans or
of how a loss is made. The one decision: a stage is the model itself with the blocks of others taken out, so every
tensor keeps the name that it has in the whole model, whatever the number of stages; the last stage gives the loss and
not logits, so what travels between stages is one tensor of hidden states.

Shapes: B rows of a micro-batch, T tokens, H hidden size.
"""

import copy
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleLoopedBFS

from pipeline.errors import ParameterError
from pipeline.training.config import PipelineSchedule, TrainConfig
from pipeline.training.parallel.tied_parameters import tied_names

STAGES_PER_RANK: Mapping[PipelineSchedule, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sum of the loss, float32 [], of logits and targets."""


def blocks_of_stages(num_blocks: int, num_stages: int) -> list[range]:
    """Consecutive blocks of each stage, as even as can be; the last stages, which also have the head, get less."""
    each, rest = divmod(num_blocks, num_stages)
    starts = [stage * each + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def check_stages(whole: nn.Module, config: TrainConfig) -> None:
    """Refuse to freeze all that a rank of the pipeline has.

    Args:
        whole: a causal language model, before it is cut; parameters may be on the meta device.
        config: the run.

    Raises:
        ParameterError: a rank would train nothing; names each, with its blocks.
    """
    num_ranks = config.mesh.pipeline
    num_blocks = sum(re.fullmatch(r"model\.layers\.\d+", name) is not None for name, _ in whole.named_modules())
    num_stages = num_ranks * STAGES_PER_RANK[config.mesh.schedule]
    if num_ranks == 1 or not config.freeze or num_blocks < num_stages:  # axes refuse the last by themselves
        return
    named = whole.named_parameters(remove_duplicate=False)
    frozen = {id(item) for name, item in named if any(re.search(pattern, name) for pattern in config.freeze)}
    cuts = blocks_of_stages(num_blocks, num_stages)
    problems = []
    for rank in range(num_ranks):
        kept = [block for cut in cuts[rank::num_ranks] for block in cut]
        is_first, is_last = rank == 0, rank == num_ranks - 1
        part = _part(whole, kept, is_first=is_first, is_last=is_last)
        if all(id(item) in frozen for item in part.parameters()):
            ends = " with the embedding" * is_first + " with the last norm and the head" * is_last
            problems.append(f"rank {rank} of the pipeline (blocks {', '.join(map(str, kept))}{ends})")
    if problems:
        raise ParameterError(
            f"freeze: {', '.join(map(repr, config.freeze))} leaves nothing to train on {'; '.join(problems)}",
            hint="freeze less, or choose `mesh.pipeline` so that every rank trains a block; 1 is always right",
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of this rank."""

    index: int
    blocks: range
    module: nn.Module
    """Tokens or hidden states in, hidden states or the loss out."""


class PipelineModel(nn.Module):
    """This rank's stages as one module, whose tensors have the names of the whole model."""

    def __init__(
        self,
        whole: nn.Module,
        *,
        rank: int,
        group: dist.ProcessGroup,
        ends: dist.ProcessGroup,
        schedule: PipelineSchedule,
        loss: Loss,
        device: torch.device,
    ) -> None:
        """Take this rank's part out of the whole model.

        Args:
            whole: a causal language model of the Llama family, on any device.
            rank: of this rank in its pipeline.
            group: the pipeline.
            ends: its first and last rank.
            schedule: order of micro-batches.
            loss: of logits and targets.
            device: where it computes.
        """
        super().__init__()
        self.group, self.ends, self._schedule_name, self._device = group, ends, schedule, device
        self._num_stages = group.size() * STAGES_PER_RANK[schedule]
        self._hidden_size: int = whole.config.hidden_size
        cuts = blocks_of_stages(len(whole.get_submodule("model.layers")), self._num_stages)
        self.stages = [
            Stage(index=index, blocks=cuts[index], module=_stage_module(whole, cuts[index], index, len(cuts), loss))
            for index in range(rank, self._num_stages, group.size())
        ]
        self.is_first, self.is_last = rank == 0, rank == group.size() - 1
        kept = {block for stage in self.stages for block in stage.blocks}
        mine = _part(whole, kept, is_first=self.is_first, is_last=self.is_last)
        for name, child in mine.named_children():
            self.add_module(name, child)
        self.aliases: Mapping[str, str] = tied_names(whole)
        """Of the whole model: a stage that has a tied parameter may have it under one name alone."""
        self._schedules: dict[tuple[int, int, int, bool], PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self.dtype = torch.float32
        """Of hidden states between stages; that of FSDP's computation."""

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The parameter that the first and the last stage both have; None on other ranks and where nothing is tied."""
        if not self.aliases or not (self.is_first or self.is_last):
            return None
        return self.get_parameter("model.embed_tokens.weight")

    def accumulate(
        self, inputs: Mapping[str, torch.Tensor], targets_NT: torch.Tensor, *, micro_batches: int, scale: float
    ) -> torch.Tensor:
        """Forward and backward of all rows of a step; gradients of the loss times `scale` are left in parameters.

        Args:
            inputs: the model's, by keyword, [N, T] each; on every stage the same.
            targets_NT: of all rows.
            micro_batches: into how many equal parts rows are cut.
            scale: what a sum of losses is multiplied by.

        Returns:
            Sum of the losses where this rank has the last stage, else 0; float32 [].
        """
        sums: list[torch.Tensor] = []
        schedule = self._schedule(inputs, micro_batches=micro_batches, trains=True)
        schedule._loss_fn = lambda total, _: _noted(total, sums) * scale
        self._run(schedule.step, inputs, targets_NT)
        self._add_tied_gradients()
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self._device)

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, torch.Tensor], targets_BT: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of one micro-batch, float32 [], the same on every stage; forward alone."""
        sums: list[torch.Tensor] = []
        schedule = self._schedule(inputs, micro_batches=1, trains=False)
        schedule._loss_fn = lambda total, _: _noted(total, sums)
        self._run(schedule.eval, inputs, targets_BT)
        for stage in self.stages:
            if isinstance(stage.module, FSDPModule):
                stage.module.reshard()  # only a backward pass would
        total = sums[0] if sums else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self.group)
        return total

    def _run(self, run: Callable[..., Any], inputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> None:
        further = {name: value for name, value in inputs.items() if name != "input_ids"}
        tokens = (inputs["input_ids"],) if self.is_first else ()
        run(*tokens, target=targets, return_outputs=False, targets=targets, **further)

    def _schedule(
        self, inputs: Mapping[str, torch.Tensor], *, micro_batches: int, trains: bool
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """The schedule for rows of this form; made once, for it holds buffers of that form."""
        rows, length = inputs["input_ids"].shape
        key = (rows // micro_batches, length, micro_batches, trains)
        if key not in self._schedules:
            stages = [self._stage(stage, rows=key[0], length=length) for stage in self.stages]
            options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": _placeholder, "scale_grads": False}
            made: PipelineScheduleSingle | PipelineScheduleMulti
            if self._schedule_name == "interleaved":
                kind = ScheduleInterleaved1F1B if trains else ScheduleLoopedBFS
                made = kind(stages, **options)
            else:
                simple = Schedule1F1B if trains and self._schedule_name == "1f1b" else ScheduleGPipe
                made = simple(stages[0], **options)
            self._schedules[key] = made
        return self._schedules[key]

    def _stage(self, stage: Stage, *, rows: int, length: int) -> PipelineStage:
        is_first, is_last = stage.index == 0, stage.index == self._num_stages - 1
        tokens_BT = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden_BTH = torch.empty(rows, length, self._hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        total = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return PipelineStage(
            stage.module,
            stage.index,
            self._num_stages,
            self._device,
            input_args=tokens_BT if is_first else hidden_BTH,
            output_args=total if is_last else hidden_BTH,
            group=self.group,
        )

    def _add_tied_gradients(self) -> None:
        """The embedding's gradient and the head's become one, on both stages."""
        copy_ = self.tied_copy
        if copy_ is not None and copy_.grad is not None:
            gradient = copy_.grad
            dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient, group=self.ends)


class _Absent(nn.Module):
    """Stands where a block of another stage is."""

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """What came in."""
        return hidden


def _part(whole: nn.Module, blocks: Collection[int], *, is_first: bool, is_last: bool) -> nn.Module:
    """The model without the blocks of others, sharing its modules.

    A tied embedding stays on the last stage, as the first name of the head's parameter.
    """
    part = _shallow(whole)
    decoder = part._modules["model"] = _shallow(whole.get_submodule("model"))
    layers = decoder.get_submodule("layers").children()
    decoder._modules["layers"] = nn.ModuleList(
        layer if index in blocks else _Absent() for index, layer in enumerate(layers)
    )
    if not is_last:
        decoder._modules["norm"] = nn.Identity()
        part._modules["lm_head"] = None
    if not is_first and not (is_last and tied_names(whole)):
        decoder._modules["embed_tokens"] = None
    return part


def _stage_module(whole: nn.Module, blocks: range, index: int, num_stages: int, loss: Loss) -> nn.Module:
    """One stage, called with what the stage before gives and the keywords that all stages get."""
    is_first, is_last = index == 0, index == num_stages - 1
    part = _part(whole, blocks, is_first=is_first, is_last=is_last)
    decoder, run = part.get_submodule("model"), type(whole).forward.__get__(part)

    def forward(received: torch.Tensor, *, targets: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        own = {"input_ids": received} if is_first else {"inputs_embeds": received}
        if is_last:
            return loss(run(**own, **inputs, use_cache=False).logits, targets)
        hidden_BTH: torch.Tensor = decoder(**own, **inputs, use_cache=False).last_hidden_state
        return hidden_BTH

    part.forward = forward
    return part


def _shallow(module: nn.Module) -> nn.Module:
    """The same submodules and parameters in a module of its own."""
    made = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            made.__dict__[name] = value.copy()
    return made


def _noted(total: torch.Tensor, sums: list[torch.Tensor]) -> torch.Tensor:
    sums.append(total.detach())
    return total


def _placeholder(total: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a schedule is given its loss with each batch")
