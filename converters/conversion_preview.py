"""What a conversion would do, from headers alone.

Owns the answer to what is in there, which road it would take, what would be refused and what it needs. Writes nothing
and reads no weights. The one decision: the plan is made by the same functions as a conversion's, so what it says would
be refused is what a conversion refuses; that takes jax, which knows the shapes of the Flax model, and the plan says so.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.flax_source import FlaxSource
from converters.leaf_work import pieces
from converters.mapping import DtypePolicy, MappingPlan, plan_mapping
from converters.operations import DTYPES, Shape
from converters.readers import open_source
from converters.roads import Road, Via, choose_road
from converters.source import CheckpointSource
from pipeline.errors import ArtifactError, ConversionError, ParameterError
from pipeline.models.parameter_writer import BUFFER_BYTES

FRAMEWORKS = ("jax", "torch", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPreview:
    """The plan of a conversion."""

    source: str
    format: str
    road: str
    """`family` or `trace`; empty where no road could be chosen."""
    road_reason: str
    family: str
    facts: Mapping[str, Any]
    """Layout facts of the family, from the config."""
    num_tensors: int
    """In the checkpoint, those that are not converted included."""
    num_parameters: int
    """Numbers in the checkpoint."""
    num_source_bytes: int
    num_target_bytes: int
    """Of the leaves that would be written; 0 where the plan is refused."""
    num_tensors_by_dtype: Mapping[str, int]
    largest_tensor: str
    largest_tensor_bytes: int
    peak_memory_bytes: int
    """For weights, beyond what the process takes itself: the largest step as read and as made, or a buffer of small
    ones."""
    tied: tuple[str, ...]
    ignored: tuple[str, ...]
    carried: tuple[str, ...]
    refusal: str
    """Why the conversion would be refused, every complaint; empty where it would be done."""
    loaded: tuple[str, ...]
    """Frameworks that were loaded to know this."""


def preview(
    source: str | Path, *, via: Via = "auto", dtype: DtypePolicy = "keep", project_root: Path | None = None
) -> ConversionPreview:
    """Plan the conversion of the checkpoint `source`, as `convert` would with the same arguments.

    Of a Flax model directory it says what the way back would write.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered, as far as headers show.
        ArtifactError: the Flax model directory is.
    """
    path = Path(source)
    if FlaxSource.recognises(path):
        return _way_back(FlaxSource(path), source=str(source))
    opened = open_source(path)
    road, plan, refusal = _plan(opened, via=via, dtype=dtype, project_root=project_root)
    work = list(pieces(plan, source=opened, conversions=[], progress=None)) if plan else []
    return ConversionPreview(
        source=str(source),
        format=opened.format,
        road=road.name if road else "",
        road_reason=road.reason if road else "",
        family=road.table.family if road else "",
        facts=road.table.facts if road else {},
        **_counted(opened),
        num_target_bytes=_target_bytes(plan, opened) if plan else 0,
        peak_memory_bytes=max(
            max((piece.num_bytes for piece in work), default=0),
            min(BUFFER_BYTES, sum(piece.num_bytes for piece in work)),
        ),
        tied=tuple(plan.tied) if plan else (),
        ignored=plan.ignored if plan else (),
        carried=plan.carried if plan else (),
        refusal=refusal,
        loaded=_loaded(),
    )


def _way_back(flax: FlaxSource, *, source: str) -> ConversionPreview:
    manifest = flax.manifest
    written = {tensor.name: _bytes(tensor.shape, tensor.dtype) for tensor in (*manifest.sources, *manifest.carried)}
    return ConversionPreview(
        source=source,
        format=flax.format,
        road=manifest.road,
        road_reason=manifest.road_reason,
        family=manifest.family,
        facts=manifest.facts,
        **_counted(flax),
        num_target_bytes=sum(written.values()),
        peak_memory_bytes=2 * max(written.values(), default=0),
        tied=tuple(manifest.tied),
        ignored=manifest.ignored,
        carried=tuple(tensor.name for tensor in manifest.carried),
        refusal="",
        loaded=_loaded(),
    )


def _counted(opened: CheckpointSource) -> dict[str, Any]:
    headers = opened.headers.values()
    sizes = {header.name: _bytes(header.shape, header.dtype) for header in headers}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return {
        "num_tensors": len(headers),
        "num_parameters": sum(math.prod(header.shape) for header in headers),
        "num_source_bytes": sum(sizes.values()),
        "num_tensors_by_dtype": dict(Counter(header.dtype for header in headers)),
        "largest_tensor": largest,
        "largest_tensor_bytes": sizes.get(largest, 0),
    }


def _loaded() -> tuple[str, ...]:
    return tuple(name for name in FRAMEWORKS if name in sys.modules)


def _plan(
    opened: CheckpointSource, *, via: Via, dtype: DtypePolicy, project_root: Path | None
) -> tuple[Road | None, MappingPlan | None, str]:
    road = None
    try:
        road = choose_road(opened, via=via, dtype=dtype, project_root=project_root)
        plan = plan_mapping(
            opened.headers, table=road.table, targets=road.targets, dtype=dtype, target_dtypes=road.target_dtypes
        )
    except (ArtifactError, ConversionError, ParameterError) as refusal:
        return road, None, str(refusal)
    return road, plan, ""


def _target_bytes(plan: MappingPlan, opened: CheckpointSource) -> int:
    return sum(
        _bytes(opened.headers[plan.stored[name]].shape, step.casts[0].after)
        for step in plan.steps
        for name in step.sources
    )


def _bytes(shape: Shape, dtype: str) -> int:
    return math.prod(shape) * (DTYPES[dtype].itemsize if dtype in DTYPES else 1)
