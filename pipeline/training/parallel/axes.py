"""Which meshes a run can have.

Owns the rules between axes, model, batch and precision. Knows nothing of processes or devices. The one decision: they
are held before a process starts, by arithmetic alone, and all that is wrong is said at once.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pipeline.errors import ParameterError
from pipeline.training.config import BatchPlan, TrainConfig, plan_batch
from pipeline.training.parallel.mesh import MeshPlan, plan_mesh
from pipeline.training.parallel.pipeline import STAGES_PER_RANK
from pipeline.training.parallel.tensor import FAMILIES

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the rules ask of a language model."""

    model_type: str
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    sliding_window: int | None
    """Tokens that a query sees; None where it sees all before it."""


def plan_axes(
    config: TrainConfig, *, world_size: int, sequence_length: int | None, shape: ModelShape | None
) -> tuple[MeshPlan, BatchPlan]:
    """The mesh of a run and how its steps are cut.

    Args:
        config: the run.
        world_size: ranks.
        sequence_length: tokens in a row; None where a row is one example.
        shape: of the language model; None for a module of the user's own.

    Raises:
        ParameterError: something does not divide or does not go together; all of it, with the arithmetic.
    """
    errors: list[ParameterError] = []
    mesh = _tried(
        lambda: plan_mesh(config.parallel, world_size=world_size, shard_group=config.shard_group, sizes=config.mesh),
        errors,
    )
    batch = _tried(lambda: plan_batch(config, sequence_length=sequence_length, world_size=world_size), errors)
    errors += [
        ParameterError(message, hint=hint)
        for message, hint in _problems(config, sequence_length=sequence_length, shape=shape, batch=batch)
    ]
    if len(errors) == 1:
        raise errors[0]
    if errors or mesh is None or batch is None:
        hints = list(dict.fromkeys(error.hint for error in errors if error.hint))
        raise ParameterError("; ".join(error.message for error in errors), hint="; ".join(hints))
    return mesh, batch


def _tried(make: Callable[[], PlanT], errors: list[ParameterError]) -> PlanT | None:
    try:
        return make()
    except ParameterError as error:
        errors.append(error)
        return None


def _problems(
    config: TrainConfig, *, sequence_length: int | None, shape: ModelShape | None, batch: BatchPlan | None
) -> Iterator[tuple[str, str]]:
    sizes = config.mesh
    if sizes.pipeline == 1 and sizes.schedule != "1f1b":
        yield (
            f"mesh: schedule {sizes.schedule} is of a pipeline, found pipeline 1",
            "set `mesh.pipeline`, or leave `schedule` out",
        )
    if sizes.model_ranks == 1:
        return
    if shape is None or sequence_length is None:
        yield (
            f"mesh: {sizes.in_words} cuts a language model of transformers, and {config.model!r} is a module of your "
            "own",
            "leave `mesh` out; `parallel` and `shard_group` work for every module",
        )
        return
    if shape.model_type not in FAMILIES:
        yield (
            f"mesh: {sizes.in_words} is known for {', '.join(FAMILIES)}, found model_type {shape.model_type}",
            "leave `mesh` out; `parallel` and `shard_group` work for every model",
        )
        return
    if config.lora is not None and sizes.tensor * sizes.pipeline > 1:
        yield (
            "mesh: `tensor` and `pipeline` do not cut the adapters of `lora`, small products beside the large ones",
            "leave out `lora`, or `mesh.tensor` and `mesh.pipeline`; the frozen weights are sharded by `parallel`",
        )
    if sizes.tensor > 1:
        yield from _tensor_problems(config, sequence_length=sequence_length, shape=shape)
    if sizes.pipeline > 1:
        yield from _pipeline_problems(config, shape=shape, batch=batch)
    if sizes.context > 1:
        yield from _context_problems(config, sequence_length=sequence_length, shape=shape)


def _tensor_problems(config: TrainConfig, *, sequence_length: int, shape: ModelShape) -> Iterator[tuple[str, str]]:
    tensor = config.mesh.tensor
    cut = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }
    uneven = [
        f"{name} {size} = {tensor} x {size // tensor} + {size % tensor}" for name, size in cut.items() if size % tensor
    ]
    if uneven:
        largest = math.gcd(*cut.values())
        fitting = [str(size) for size in range(1, largest + 1) if largest % size == 0]
        yield (
            f"mesh: tensor {tensor} does not divide " + ", ".join(uneven),
            f"with this model `mesh.tensor` may be {', '.join(fitting)}",
        )
    own, rest = divmod(sequence_length, config.mesh.context)
    if not rest and own % tensor:
        yield (
            f"mesh: tensor {tensor} cuts rows by tokens between products, and does not divide {own} tokens of a rank",
            "choose a `sequence_length` of the data stage that it divides",
        )
    if config.compile:
        yield (
            f"compile: true with mesh: tensor {tensor} gives other gradients than without (torch 2.13: the norm of the "
            "second step was off by a quarter)",
            "leave out `compile`, or `mesh.tensor`; `context` and `pipeline` go with `compile`",
        )
    if config.precision == "float8":
        yield (
            f"precision: float8 multiplies whole matrices, and mesh: tensor {tensor} cuts them",
            "set `precision: bfloat16`, or leave `mesh.tensor` out",
        )


def _pipeline_problems(config: TrainConfig, *, shape: ModelShape, batch: BatchPlan | None) -> Iterator[tuple[str, str]]:
    sizes = config.mesh
    stages = sizes.pipeline * STAGES_PER_RANK[sizes.schedule]
    if shape.num_layers < stages:
        yield (
            f"mesh: pipeline {sizes.pipeline} with schedule {sizes.schedule} has {stages} stages, and the model "
            f"{shape.num_layers} blocks",
            f"set `mesh.pipeline` to at most {max(1, shape.num_layers // STAGES_PER_RANK[sizes.schedule])}",
        )
    if config.faults.out_of_memory == "smaller_micro_batch" and sizes.schedule == "interleaved":
        yield (
            "mesh: schedule interleaved fixes the number of micro-batches, and faults.out_of_memory: "
            "smaller_micro_batch changes it",
            "set `schedule: 1f1b`, or `out_of_memory: stop`",
        )
    if batch is None:
        return
    if sizes.schedule == "1f1b" and batch.accumulation < stages:
        yield (
            f"mesh: pipeline {sizes.pipeline} with schedule 1f1b needs at least {stages} micro-batches in a step, "
            f"found {batch.accumulation}",
            "lower `micro_batch_sequences`, raise the global batch, or set `schedule: gpipe`",
        )
    rounds = max(1, batch.accumulation // sizes.pipeline)
    if sizes.schedule == "interleaved" and batch.accumulation % rounds:
        yield (
            f"mesh: schedule interleaved takes micro-batches in {rounds} rounds of {sizes.pipeline} or more of equal "
            f"length, and {rounds} does not divide {batch.accumulation} micro-batches",
            f"make the micro-batches of a step a multiple of {sizes.pipeline}",
        )


def _context_problems(config: TrainConfig, *, sequence_length: int, shape: ModelShape) -> Iterator[tuple[str, str]]:
    context = config.mesh.context
    if sequence_length % (2 * context):
        yield (
            f"mesh: context {context} cuts a row into {2 * context} equal parts, and sequence_length {sequence_length} "
            f"= {2 * context} x {sequence_length // (2 * context)} + {sequence_length % (2 * context)}",
            f"choose a `sequence_length` of the data stage that is a multiple of {2 * context}",
        )
    if shape.sliding_window is not None and shape.sliding_window < sequence_length:
        yield (
            f"mesh: context {context} attends to whole rows, and the model to the last {shape.sliding_window} "
            f"tokens of {sequence_length}",
            "leave `mesh.context` out, or train on rows that the window holds",
        )
