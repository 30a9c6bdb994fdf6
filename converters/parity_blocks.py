"""The second level of parity: the output of every block on both sides.

Owns the pairing of torch module paths with Flax module paths, and the error of one block. Numpy only; knows nothing of
frameworks. The one decision: errors are relative to the largest value of the torch block, because activations grow with
depth and single numbers cross zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converters.parity_report import BlockAgreement
from converters.rules import match, render
from pipeline.errors import ConversionError
from pipeline.models.description import Arrays


def pair_blocks(taps: Sequence[str], *, blocks: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The torch module path by Flax path, in the order of `taps`.

    Args:
        taps: Flax paths that were tapped.
        blocks: templates of torch path and Flax path (`FamilyTable.blocks`).

    Raises:
        ConversionError: a template is never tapped, or a tapped path has several templates.
    """
    pairs: dict[str, str] = {}
    used: set[tuple[str, str]] = set()
    complaints = []
    for path in taps:
        hits = [(pair, found) for pair in blocks if (found := match(pair[1], path)) is not None]
        if len(hits) > 1:
            complaints.append(f"  {path}: several templates take it: " + ", ".join(pair[1] for pair, _ in hits))
        for pair, captures in hits[:1]:
            pairs[path] = render(pair[0], captures)
            used.add(pair)
    complaints += [
        f"  {ours}: the Flax model taps no such path" for theirs, ours in blocks if (theirs, ours) not in used
    ]
    if complaints:
        raise ConversionError("the family's blocks do not fit its model:\n" + "\n".join(complaints))
    return pairs


def compare_blocks(pairs: Mapping[str, str], *, taps: Arrays, activations: Arrays) -> tuple[BlockAgreement, ...]:
    """Hold each tapped value against the torch module's.

    Args:
        pairs: torch module path by Flax path.
        taps: Flax values by path.
        activations: torch values by module path.

    Raises:
        ConversionError: a torch module never ran, or the two values have different shapes; lists all.
    """
    found, complaints = [], []
    for ours, theirs in pairs.items():
        candidate, reference = taps[ours], activations.get(theirs)
        if reference is None:
            complaints.append(f"  {theirs}: never ran in torch")
        elif (aligned := as_torch_lays_out(candidate, shape=reference.shape)) is None:
            complaints.append(f"  {ours} is {candidate.shape}, {theirs} in torch {reference.shape}")
        else:
            largest, mean = relative_errors(reference, aligned)
            found.append(
                BlockAgreement(
                    name=ours,
                    torch_name=theirs,
                    shape=tuple(reference.shape),
                    max_relative=largest,
                    mean_relative=mean,
                )
            )
    if complaints:
        raise ConversionError("blocks cannot be compared:\n" + "\n".join(complaints))
    return tuple(found)


def judge_precisely(
    blocks: Sequence[BlockAgreement], *, taps: Arrays, activations: Arrays, precise: Arrays
) -> tuple[BlockAgreement, ...]:
    """The same blocks with torch in float64 as the reference, and torch's own rounding beside the error.

    Two float32 computations differ by the rounding of both. Where that passes the limit, only a third, exact one can
    say which side is wrong.

    Args:
        blocks: as `compare_blocks` found them.
        taps: Flax values by path.
        activations: torch values in float32 by module path.
        precise: torch values in float64 by module path.
    """
    judged = []
    for block in blocks:
        reference = precise[block.torch_name]
        candidate = as_torch_lays_out(taps[block.name], shape=reference.shape)
        assert candidate is not None
        largest, mean = relative_errors(reference, candidate)
        rounding, _ = relative_errors(reference, activations[block.torch_name])
        judged.append(replace(block, max_relative=largest, mean_relative=mean, torch_rounding=rounding))
    return tuple(judged)


def as_torch_lays_out(array: NDArray[Any], *, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """`array` with its channels where torch has them, or None where no such order has this shape.

    Flax images are [batch, height, width, channels], torch's [batch, channels, height, width].
    """
    if array.shape == shape:
        return array
    if array.ndim == len(shape) >= 3 and (moved := np.moveaxis(array, -1, 1)).shape == shape:
        return moved
    return None


def relative_errors(reference: NDArray[Any], candidate: NDArray[Any]) -> tuple[float, float]:
    """`max |c - r| / max |r|` and `mean |c - r| / mean |r|`; infinite where either side is not finite."""
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        return float("inf"), float("inf")
    difference, scale = np.abs(candidate.astype(np.float64) - reference), np.abs(reference.astype(np.float64))
    return _ratio(difference.max(initial=0.0), scale.max(initial=0.0)), _ratio(_mean(difference), _mean(scale))


def _ratio(difference: float, scale: float) -> float:
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / scale)


def _mean(array: NDArray[Any]) -> float:
    return float(array.mean()) if array.size else 0.0
