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

from converters.mapping import DtypePolicy, MappingPlan, plan_mapping
from converters.operations import DTYPES
from converters.readers import READERS, open_source
from converters.roads import Road, Via, choose_road
from converters.source import CheckpointSource, TensorHeader
from pipeline.errors import ArtifactError, ConversionError, ParameterError

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
    """For weights, beyond what the process takes itself: the largest step twice, once as read and once as written."""
    tied: tuple[str, ...]
    ignored: tuple[str, ...]
    carried: tuple[str, ...]
    refusal: str
    """Why the conversion would be refused, every complaint; empty where it would be done."""
    loaded: tuple[str, ...]
    """Frameworks that were loaded to know this."""


def preview(source: str | Path, *, via: Via = "auto", dtype: DtypePolicy = "keep") -> ConversionPreview:
    """Plan the conversion of the checkpoint `source`, as `convert` would with the same arguments.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered, as far as headers show.
    """
    opened = open_source(Path(source))
    road, plan, refusal = _plan(opened, via=via, dtype=dtype)
    sizes = {name: _bytes(header) for name, header in opened.headers.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return ConversionPreview(
        source=str(source),
        format=opened.format,
        road=road.name if road else "",
        road_reason=road.reason if road else "",
        family=road.table.family if road else "",
        facts=road.table.facts if road else {},
        num_tensors=len(opened.headers),
        num_parameters=sum(math.prod(header.shape) for header in opened.headers.values()),
        num_source_bytes=sum(sizes.values()),
        num_target_bytes=_target_bytes(plan, opened) if plan else 0,
        num_tensors_by_dtype=dict(Counter(header.dtype for header in opened.headers.values())),
        largest_tensor=largest,
        largest_tensor_bytes=sizes.get(largest, 0),
        peak_memory_bytes=_peak_bytes(plan, opened) if plan else 2 * sizes.get(largest, 0),
        tied=tuple(plan.tied) if plan else (),
        ignored=plan.ignored if plan else (),
        carried=plan.carried if plan else (),
        refusal=refusal,
        loaded=tuple(name for name in FRAMEWORKS if name in sys.modules),
    )


def recognised(path: str | Path) -> bool:
    """True where a reader knows what the file or directory holds; looks at names alone."""
    return any(reader.recognises(Path(path)) for reader in READERS)


def _plan(opened: CheckpointSource, *, via: Via, dtype: DtypePolicy) -> tuple[Road | None, MappingPlan | None, str]:
    road = None
    try:
        road = choose_road(opened, via=via)
        plan = plan_mapping(
            opened.headers, table=road.table, targets=road.targets, dtype=dtype, target_dtypes=road.target_dtypes
        )
    except (ArtifactError, ConversionError, ParameterError) as refusal:
        return road, None, str(refusal)
    return road, plan, ""


def _bytes(header: TensorHeader, *, dtype: str | None = None) -> int:
    found = DTYPES.get(dtype or header.dtype)
    return math.prod(header.shape) * (found.itemsize if found else 1)


def _target_bytes(plan: MappingPlan, opened: CheckpointSource) -> int:
    return sum(
        _bytes(opened.headers[plan.stored[name]], dtype=step.casts[0].after)
        for step in plan.steps
        for name in step.sources
    )


def _peak_bytes(plan: MappingPlan, opened: CheckpointSource) -> int:
    steps = [sum(_bytes(opened.headers[plan.stored[name]]) for name in step.sources) for step in plan.steps]
    return 2 * max(steps, default=0)
