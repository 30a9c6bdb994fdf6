"""The work of a conversion, a step at a time: read tensors, take their digests, make leaves.

Owns what a step holds in memory and what it notes for the record. Knows nothing of formats, of families or of how
leaves are written. The one decision: every array is let go as soon as the next one is made from it, so a step holds at
most its tensors and its leaves, and the record is complete when the last leaf is.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from converters.manifest import Conversion, SourceTensor, TargetLeaf
from converters.mapping import MappingPlan, Step
from converters.operations import DTYPES, Array
from converters.source import CheckpointSource
from pipeline.errors import ConversionError
from pipeline.models.parameter_writer import Piece

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""


def pieces(
    plan: MappingPlan, *, source: CheckpointSource, conversions: list[Conversion], progress: Progress | None
) -> Iterator[Piece]:
    """The steps of `plan` in order; `conversions` grows by each that is done."""
    for done, step in enumerate(plan.steps, start=1):
        made = sum(_num_bytes(source.headers[plan.stored[name]].shape, step.casts[0].after) for name in step.sources)
        read = sum(_num_bytes(source.headers[plan.stored[name]].shape, step.casts[0].before) for name in step.sources)
        yield Piece(
            leaves=step.targets,
            num_bytes=max(read + made, 2 * made),
            make=partial(_perform, step, done, plan=plan, source=source, conversions=conversions, progress=progress),
        )


def source_tensor(name: str, array: Array, *, plan: MappingPlan) -> SourceTensor:
    """The record of a tensor that was read."""
    return SourceTensor(
        name=name,
        stored_name=plan.stored[name],
        shape=array.shape,
        dtype=str(array.dtype),
        sha256=sha256(array),
    )


def sha256(array: Array) -> str:
    """Of the array's bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _perform(
    step: Step,
    done: int,
    *,
    plan: MappingPlan,
    source: CheckpointSource,
    conversions: list[Conversion],
    progress: Progress | None,
) -> list[Array]:
    arrays = [source.read(plan.stored[name]) for name in step.sources]
    sources = tuple(source_tensor(name, array, plan=plan) for name, array in zip(step.sources, arrays, strict=True))
    try:
        for operation in step.operations:
            arrays = operation.apply(arrays)
    except ValueError as error:
        raise ConversionError(f"{', '.join(step.sources)}: {error} (rule {step.rule})") from error
    for index in range(len(arrays)):
        arrays[index] = np.asarray(arrays[index], order="C")  # `ascontiguousarray` gives a number an axis
    conversions.append(
        Conversion(
            sources=sources,
            targets=tuple(
                TargetLeaf(path=path, shape=array.shape, dtype=str(array.dtype))
                for path, array in zip(step.targets, arrays, strict=True)
            ),
            operations=tuple(map(str, step.operations)),
            is_exact=all(cast.is_exact for cast in step.casts),
        )
    )
    if progress is not None:
        progress(done, len(plan.steps))
    return arrays


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
