"""Two checkpoints of any formats, tensor by tensor.

Owns what counts as a difference and how names of two checkpoints are brought together. Knows nothing of formats. The
one decision: names are compared as the model knows them, and a tensor that the family declares tied or computed is no
difference, so a file and what was made of it are the same unless a number changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converters.families.registry import table_for
from converters.families.table import FamilyTable
from converters.flax_source import open_model
from converters.operations import Array
from converters.parity_tensors import same_bits
from converters.rules import match
from converters.source import CheckpointSource
from converters.wrappers import canonical_names
from pipeline.errors import ArtifactError, CheckpointError, ConversionError, ParameterError

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""
_CHUNK = 2**22
"""Numbers compared at a time, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor that is not the same."""

    name: str
    kind: str
    """`missing` (only the first has it), `extra` (only the second has it), `shape`, `dtype` or `values`."""
    first: str
    """Shape and dtype in the first checkpoint; empty where it has none."""
    second: str
    num_different: int | None = None
    """Numbers that differ; None where they were not compared."""
    max_difference: float | None = None
    """Infinite where one side is not finite and the other is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference:
    """All of it."""

    first: str
    second: str
    first_format: str
    second_format: str
    tolerance: float
    num_compared: int
    """Tensors that both have."""
    num_identical: int
    """Of these, bit for bit."""
    max_difference: float
    """Over all tensors whose numbers were compared."""
    differences: tuple[TensorDifference, ...]
    not_held: tuple[str, ...]
    """Tensors of one side that the family declares as computed by the model."""

    @property
    def same(self) -> bool:
        """Nothing differs, by the tolerance."""
        return not self.differences


def diff(
    first: str | Path, second: str | Path, *, tolerance: float = 0.0, progress: Progress | None = None
) -> CheckpointDifference:
    """Compare two checkpoints or Flax model directories; one tensor of each is in memory at a time.

    Args:
        first: a checkpoint of any format, or a Flax model directory, which is read under torch's names.
        second: as `first`.
        tolerance: 0 asks for the same bits and the same dtypes. Above it, numbers may differ by that much, and dtypes
            may differ.
        progress: told after each tensor.

    Raises:
        CheckpointError: a checkpoint is missing, truncated or altered.
        ArtifactError: a Flax model directory is.
        ConversionError: tensors of one checkpoint have the same name; lists all.
    """
    one, other = open_model(Path(first)), open_model(Path(second))
    table = _table(one) or _table(other)
    ours, theirs = _names(one, other, table=table)
    both = [name for name in ours if name in theirs]
    differences = [_one_sided(name, one, ours, kind="missing") for name in ours if name not in theirs]
    differences += [_one_sided(name, other, theirs, kind="extra") for name in theirs if name not in ours]
    not_held = tuple(sorted(found.name for found in differences if _is_computed(found.name, table)))
    differences = [found for found in differences if found.name not in not_held]
    num_identical, largest = 0, 0.0
    for done, name in enumerate(both, start=1):
        found, is_identical, difference = _compare(
            name, one=one, stored_one=ours[name], other=other, stored_other=theirs[name], tolerance=tolerance
        )
        differences += found
        num_identical += is_identical
        largest = max(largest, difference)
        if progress is not None:
            progress(done, len(both))
    return CheckpointDifference(
        first=str(first),
        second=str(second),
        first_format=one.format,
        second_format=other.format,
        tolerance=tolerance,
        num_compared=len(both),
        num_identical=num_identical,
        max_difference=largest,
        differences=tuple(differences),
        not_held=not_held,
    )


def _table(source: CheckpointSource) -> FamilyTable | None:
    """Of the family that the source's config names; None where it names none, which a comparison can do without."""
    try:
        return table_for(source.config(), names=tuple(canonical_names(source.headers)))
    except (ArtifactError, CheckpointError, ConversionError, ParameterError):
        return None


def _names(
    one: CheckpointSource, other: CheckpointSource, *, table: FamilyTable | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Stored name by name, of both: prefixes as the first has them, and tied tensors on both sides or on none."""
    ours = canonical_names(one.headers)
    prefixes = table.prefixes if table else ()
    theirs = canonical_names(other.headers, prefixes=prefixes, is_known=lambda name: name in ours)
    for tie in table.ties if table else ():
        for names in (ours, theirs):
            if tie.same_as in names and tie.tensor in ours.keys() | theirs.keys():
                names.setdefault(tie.tensor, names[tie.same_as])
    return ours, theirs


def _is_computed(name: str, table: FamilyTable | None) -> bool:
    return table is not None and any(match(template, name) is not None for template in table.ignored)


def _one_sided(name: str, source: CheckpointSource, stored: Mapping[str, str], *, kind: str) -> TensorDifference:
    text = _text(source, stored[name])
    first, second = (text, "") if kind == "missing" else ("", text)
    return TensorDifference(name=name, kind=kind, first=first, second=second)


def _compare(
    name: str,
    *,
    one: CheckpointSource,
    stored_one: str,
    other: CheckpointSource,
    stored_other: str,
    tolerance: float,
) -> tuple[list[TensorDifference], bool, float]:
    """What differs, whether the bits are the same, and the largest difference of the numbers."""
    first, second = _text(one, stored_one), _text(other, stored_other)
    if one.headers[stored_one].shape != other.headers[stored_other].shape:
        return [TensorDifference(name=name, kind="shape", first=first, second=second)], False, 0.0
    ours, theirs = one.read(stored_one), other.read(stored_other)
    if ours.dtype == theirs.dtype and same_bits(ours, theirs):
        return [], True, 0.0
    num_different, largest = _numbers(ours, theirs)
    found = TensorDifference(
        name=name,
        kind="values" if num_different else "dtype",
        first=first,
        second=second,
        num_different=num_different,
        max_difference=largest,
    )
    return [] if tolerance > 0.0 and largest <= tolerance else [found], False, largest


def _numbers(ours: Array, theirs: Array) -> tuple[int, float]:
    """How many numbers differ, and by how much at most; the same NaN or infinity on both sides is no difference."""
    num_different, largest = 0, 0.0
    flat = (ours.reshape(-1), theirs.reshape(-1))
    for start in range(0, ours.size, _CHUNK):
        left, right = (part[start : start + _CHUNK].astype(np.float64) for part in flat)
        differs = ~((left == right) | (np.isnan(left) & np.isnan(right)))
        num_different += int(np.count_nonzero(differs))
        gaps = np.abs(left[differs] - right[differs])
        largest = max(largest, float(np.where(np.isfinite(gaps), gaps, np.inf).max(initial=0.0)))
    return num_different, largest


def _text(source: CheckpointSource, stored: str) -> str:
    header = source.headers[stored]
    return f"{header.dtype} {list(header.shape)}"
