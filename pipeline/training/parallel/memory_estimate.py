"""How much memory a rank takes at its peak, by kind.

Owns the arithmetic: a step is walked through block by block, forward and back, and what is alive at each moment is
added up. Knows nothing of models or torch; sizes come from whoever counted them. The one decision: the peak is the
largest sum of one moment, not the sum of the largest parts, so what is never alive together is never added.

Sources: state of parameters, gradients and AdamW of 16 bytes a parameter in float32 (Rajbhandari et al., "ZeRO", 2020,
section 3.1); what FSDP2 copies when it gathers and reduces (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); gloo reduces and scatters by reducing a whole copy
(ProcessGroupGloo). Measured against it: `pipeline bench train --only memory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.training.config import ActivationCheckpointing, Parallel, PipelineSchedule

FLOAT32_BYTES = 4
ADAMW_BYTES = 8
"""Two moments in float32."""
MUON_BYTES = 4
"""One."""
SELECTIVE_SHARE = 0.5
"""Of what a block keeps without recomputation, beside its input: (4230 - 384) / 7432 = 0.52 of llama-8m, see
`tasks/recompute.py`."""
LIBRARIES_BYTES = 500 << 20
"""Of a rank on the host, after imports; measured: 430 to 500 MB."""
Kind = Literal[
    "parameters", "gradients", "optimizer", "average", "gathered", "reduced", "activations", "logits", "snapshot"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """One group of FSDP that is gathered and freed by itself. Bytes are those of one micro-batch."""

    parameters: int
    trained: int
    """Parameters that have a gradient."""
    saved_bytes: int
    """Activations kept for the backward pass."""
    input_bytes: int
    largest_bytes: int
    """Of one activation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A model as `tasks/memory_count.py` counts it."""

    blocks: tuple[BlockSize, ...]
    rest: BlockSize
    """What is in no block: embedding, head, last norm; activations without the logits."""
    logits_bytes: int
    """Of the largest tensor that the loss keeps; 0 where there is none to speak of."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.rest.parameters + sum(block.parameters for block in self.blocks)

    @property
    def trained(self) -> int:
        """Those with a gradient."""
        return self.rest.trained + sum(block.trained for block in self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What a rank holds of a model and how it trains it."""

    parallel: Parallel
    shard: int
    """Ranks that hold one copy together."""
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    schedule: PipelineSchedule = "1f1b"
    accumulation: int = 1
    recompute: ActivationCheckpointing = "none"
    computed_bytes: int = FLOAT32_BYTES
    """Of one gathered parameter."""
    optimizer_bytes: int = ADAMW_BYTES
    """Of one parameter of a block that is trained."""
    rest_optimizer_bytes: int = ADAMW_BYTES
    """Likewise, of what is in no block."""
    average_bytes: int = 0
    """Of the moving average of one parameter that is trained."""
    on_gloo: bool = True
    keeps_snapshot: bool = False
    """True where checkpoints are written in the background, on the host."""
    keeps_trained_only: bool = False
    """True where a checkpoint has the parameters that are trained, and no others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank at the moment of the peak, by kind."""

    by_kind: Mapping[Kind, int]

    @property
    def peak_bytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())

    def without(self, *kinds: Kind) -> "MemoryEstimate":
        """Where these are held elsewhere."""
        return MemoryEstimate(by_kind={kind: size for kind, size in self.by_kind.items() if kind not in kinds})

    def only(self, *kinds: Kind) -> "MemoryEstimate":
        """What is held elsewhere."""
        return self.without(*(self.by_kind.keys() - set(kinds)))


@dataclass(slots=True)
class _Live:
    """What is alive now, and the fullest moment so far."""

    now: dict[Kind, float] = field(default_factory=dict)
    peak: dict[Kind, float] = field(default_factory=dict)

    def add(self, kind: Kind, size: float) -> None:
        self.now[kind] = self.now.get(kind, 0.0) + size
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def drop(self, kind: Kind, size: float) -> None:
        self.now[kind] -= size

    def pulse(self, kind: Kind, size: float) -> None:
        """Alive for a moment."""
        self.add(kind, size)
        self.drop(kind, size)


def estimate_memory(model: ModelSize, plan: RankPlan) -> MemoryEstimate:
    """Walk through the last pass of a step, in which everything is alive that ever is.

    Args:
        model: the whole model; axes that cut it are applied here.
        plan: of the rank.
    """
    model, live = _part_of(model, plan), _Live()
    shards = plan.shard
    at_rest = _at_rest(model, plan)
    for kind, size in at_rest.items():
        live.add(kind, size)
    if plan.keeps_snapshot:
        left_out = model.parameters - model.trained if plan.keeps_trained_only else 0
        live.add("snapshot", sum(at_rest.values()) - FLOAT32_BYTES * left_out / shards)
    if plan.accumulation > 1:
        held = shards if _reduces_each_pass(plan) else 1
        live.add("gradients", FLOAT32_BYTES * model.trained / held)
        if not _reduces_each_pass(plan):
            live.add("gathered", plan.computed_bytes * model.parameters)
    _forward(model, plan, live)
    _backward(model, plan, live)
    return MemoryEstimate(by_kind={kind: round(size) for kind, size in live.peak.items()})


def state_memory(model: ModelSize, plan: RankPlan) -> MemoryEstimate:
    """What is alive together in every update, whatever a step computes; no rank holds less.

    Sharded evenly: padding, and what the ranks of a tensor axis all hold, come on top. A rank of a pipeline may have
    neither embedding nor head.

    Args:
        model: the whole model; activations do not count.
        plan: of the rank.
    """
    nothing = BlockSize(parameters=0, trained=0, saved_bytes=0, input_bytes=0, largest_bytes=0)
    blocks = model.blocks[: len(model.blocks) // plan.pipeline]
    share = replace(model, blocks=blocks, rest=model.rest if plan.pipeline == 1 else nothing)
    held = _at_rest(share, plan) | {"gradients": FLOAT32_BYTES * share.trained / plan.shard}
    return MemoryEstimate(by_kind={kind: int(size / plan.tensor) for kind, size in held.items()})


def _at_rest(model: ModelSize, plan: RankPlan) -> dict[Kind, float]:
    """What a rank holds between steps."""
    in_rest = model.rest.trained
    state = plan.optimizer_bytes * (model.trained - in_rest) + plan.rest_optimizer_bytes * in_rest
    return {
        "parameters": FLOAT32_BYTES * model.parameters / plan.shard,
        "optimizer": state / plan.shard,
        "average": plan.average_bytes * model.trained / plan.shard,
    }


def _reduces_each_pass(plan: RankPlan) -> bool:
    return plan.parallel in ("zero2", "zero3", "hsdp")


def _frees_after_forward(plan: RankPlan) -> bool:
    return plan.parallel in ("zero3", "hsdp")


def _is_gathered(plan: RankPlan) -> bool:
    """True where parameters are whole already when the pass begins."""
    return plan.accumulation > 1 and not _reduces_each_pass(plan)


def _part_of(model: ModelSize, plan: RankPlan) -> ModelSize:
    """What the axes that cut the model leave of it to one rank: that with the most, which has the head."""
    tensor, context = plan.tensor, plan.context
    passes = 1
    if plan.pipeline > 1:
        passes = plan.accumulation if plan.schedule == "gpipe" else min(plan.pipeline, plan.accumulation)

    def cut(block: BlockSize) -> BlockSize:
        return BlockSize(
            parameters=block.parameters // tensor,
            trained=block.trained // tensor,
            saved_bytes=passes * block.saved_bytes // (tensor * context),
            input_bytes=passes * block.input_bytes // context,
            largest_bytes=block.largest_bytes // (tensor * context),
        )

    return replace(
        model,
        blocks=tuple(cut(block) for block in model.blocks[: -(-len(model.blocks) // plan.pipeline)]),
        rest=cut(model.rest),
        logits_bytes=model.logits_bytes // (tensor * context),
    )


def _gather(block: BlockSize, plan: RankPlan, live: _Live) -> None:
    """Copy a group's parameters together; with one shard there is no buffer between."""
    size = plan.computed_bytes * block.parameters
    if plan.shard > 1:
        live.add("gathered", size)
    live.add("gathered", size)
    if plan.shard > 1:
        live.drop("gathered", size)


def _kept(block: BlockSize, plan: RankPlan) -> float:
    """Activations of a block between its forward and its backward pass."""
    if plan.recompute == "none":
        return block.saved_bytes
    return block.input_bytes + (SELECTIVE_SHARE * block.saved_bytes if plan.recompute == "selective" else 0.0)


def _forward(model: ModelSize, plan: RankPlan, live: _Live) -> None:
    if not _is_gathered(plan):
        _gather(model.rest, plan, live)
    for number, block in enumerate(model.blocks):
        if not _is_gathered(plan):
            _gather(block, plan, live)
        is_last = number == len(model.blocks) - 1
        gathers_ahead = plan.on_gloo and plan.shard > 1 and not (is_last or _is_gathered(plan))
        ahead = plan.computed_bytes * model.blocks[number + 1].parameters if gathers_ahead else 0
        live.add("gathered", ahead)
        if plan.recompute != "none":
            live.pulse("activations", block.saved_bytes)
        live.add("activations", _kept(block, plan))
        live.drop("gathered", ahead)  # its buffer is counted with its own gather
        if _frees_after_forward(plan) and not is_last:
            live.drop("gathered", plan.computed_bytes * block.parameters)
    live.add("activations", model.rest.saved_bytes)
    # Logits beside what the loss keeps; going back, the gradient of that beside the gradient of the logits.
    live.add("logits", model.logits_bytes)
    live.pulse("logits", 2 * model.logits_bytes)


def _backward(model: ModelSize, plan: RankPlan, live: _Live) -> None:
    rest = model.rest
    live.add("gradients", FLOAT32_BYTES * rest.trained)
    live.drop("logits", model.logits_bytes)
    live.drop("activations", rest.saved_bytes)
    for number in range(len(model.blocks) - 1, -1, -1):
        block = model.blocks[number]
        if _frees_after_forward(plan) and number < len(model.blocks) - 1:
            _gather(block, plan, live)
        ahead = plan.computed_bytes * model.blocks[number - 1].parameters if number and _prefetches(plan) else 0
        live.add("gathered", ahead)
        if plan.recompute != "none":
            live.add("activations", block.saved_bytes)
            live.drop("activations", _kept(block, plan))
        live.pulse("activations", 2 * block.largest_bytes)
        live.drop("activations", block.saved_bytes)
        live.add("gradients", FLOAT32_BYTES * block.trained)
        live.drop("gathered", plan.computed_bytes * block.parameters + ahead)
        _reduce(block, plan, live)
    # The gradient of an embedding is as large as the embedding, beside that of the head it is tied to.
    live.pulse("gradients", FLOAT32_BYTES * rest.trained)
    live.drop("gathered", plan.computed_bytes * rest.parameters)
    _reduce(rest, plan, live)


def _prefetches(plan: RankPlan) -> bool:
    return _frees_after_forward(plan) and plan.shard > 1


def _reduce(block: BlockSize, plan: RankPlan, live: _Live) -> None:
    """From a group's whole gradient to this rank's share of the mean."""
    whole = FLOAT32_BYTES * block.trained
    is_first = plan.accumulation == 1
    if not is_first and not _reduces_each_pass(plan):
        live.drop("gradients", whole)  # it was added to the one that is kept
    live.add("reduced", whole)
    live.drop("gradients", whole)
    if plan.on_gloo and plan.shard > 1:
        live.pulse("reduced", whole)
    live.add("gradients", whole / plan.shard)
    if not is_first and _reduces_each_pass(plan):
        live.drop("gradients", whole / plan.shard)  # likewise
    live.drop("reduced", whole)
