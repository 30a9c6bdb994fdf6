"""What differs between two committed checkpoints, to the bit, or by how much.

Owns the comparison of parameters, optimizer state, extras and RNG states. Knows nothing of how they came about. The one
decision: checkpoints are compared as they lie in the store, by one process, so that nothing that loads them can hide a
difference.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeline.artifacts.store import open_store
from pipeline.training.checkpoints.checkpoint import DCP_DIRECTORY
from pipeline.training.checkpoints.commit import CheckpointCommit

MAX_NAMED = 3


def state_differences(
    workspace: str, commit: CheckpointCommit, *, other_workspace: str, other: CheckpointCommit
) -> list[str]:
    """Every kind of state that is not bit-equal, with how many entries differ and the first of them by name."""
    ours, theirs = (_state(place, made) for place, made in ((workspace, commit), (other_workspace, other)))
    found = []
    for kind in sorted({*ours, *theirs}):
        names = sorted({*ours.get(kind, {}), *theirs.get(kind, {})})
        different = [
            name for name in names if not _is_equal(ours.get(kind, {}).get(name), theirs.get(kind, {}).get(name))
        ]
        if different:
            more = ", ..." if len(different) > MAX_NAMED else ""
            found.append(f"{kind}: {len(different)} of {len(names)} differ ({', '.join(different[:MAX_NAMED])}{more})")
    return found


def state_distances(
    workspace: str, commit: CheckpointCommit, *, other_workspace: str, other: CheckpointCommit
) -> dict[str, float]:
    """How far two states are apart, by kind, where they need not be bit-equal; RNG states have no distance.

    Returns:
        ||a - b|| / ||b|| over all floating-point tensors of a kind together (Euclidean, in float64), of the optimizer
        by what they are (`optimizer.exp_avg`, ...), for counts of steps would outweigh all else; infinite where the
        kinds do not have the same entries, an entry that is no such tensor differs, or something is not a number.
    """
    ours, theirs = (_split(_state(place, made)) for place, made in ((workspace, commit), (other_workspace, other)))
    return {
        kind: _distance(ours.get(kind, {}), theirs.get(kind, {})) for kind in sorted({*ours, *theirs}) if kind != "rng"
    }


def _distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    if ours.keys() != theirs.keys():
        return math.inf
    squared_difference = squared_norm = 0.0
    for name, mine in ours.items():
        other = theirs[name]
        if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor) and mine.is_floating_point():
            if mine.shape != other.shape:
                return math.inf
            squared_difference += float((mine.double() - other.double()).square().sum())
            squared_norm += float(other.double().square().sum())
        elif not _is_equal(mine, other):
            return math.inf
    distance = math.sqrt(squared_difference / squared_norm) if squared_norm else math.sqrt(squared_difference)
    return math.inf if math.isnan(distance) else distance


def _split(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The optimizer's entries by their last name."""
    split: dict[str, dict[str, Any]] = {}
    for kind, values in state.items():
        for name, value in values.items():
            of_kind = f"{kind}.{name.rpartition('.')[2]}" if kind == "optimizer" else kind
            split.setdefault(of_kind, {})[name] = value
    return split


def _state(workspace: str, commit: CheckpointCommit) -> dict[str, dict[str, Any]]:
    directory = open_store(workspace).local_path(commit.key.prefix)
    with tempfile.TemporaryDirectory(prefix="pipeline-compare-") as scratch:
        whole = Path(scratch, "whole.pt")
        dcp_to_torch_save(directory / DCP_DIRECTORY, whole)
        held = torch.load(whole, map_location="cpu", weights_only=True)
    state = {kind: dict(_flat(values, "")) for kind, values in held.items()}
    state["rng"] = {
        name: value
        for path in sorted(directory.glob("rank-*.pt"))
        for name, value in _flat(torch.load(path, map_location="cpu", weights_only=True), f"{path.stem}.")
    }
    return state


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), value


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same_form = left.dtype == right.dtype and left.shape == right.shape
        return same_form and torch.equal(_bytes(left), _bytes(right))
    return type(left) is type(right) and bool(left == right)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not values: NaN is equal to itself here, and 0.0 is not -0.0."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)
