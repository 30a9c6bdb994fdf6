"""Arrays in memory to a dataset directory: the work of `data.arrays`, without the stage around it.

Owns what is refused, the split, and the layout (`train-00000.pixels.npy`, ..., `manifest.json`). Knows nothing of
where arrays come from. The one decision: dtypes are those that both frameworks have on every device (float32, int64,
uint8, bool), so a model is trained, converted and served on the same numbers.

Shapes: N examples; an array is [N, *shape of one example].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.array_manifest import ArrayManifest, ArraySpec, ArraySplit
from pipeline.data.manifest import ShardEntry
from pipeline.data.order import shuffled_rows
from pipeline.data.shard_file import write_shard
from pipeline.errors import ParameterError, nearest_name

Array = npt.NDArray[Any]
_KEPT_DTYPES = ("uint8", "bool", "float32", "int64")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayPlan:
    """What decides the bytes of a dataset, beside the arrays."""

    target: str
    validation_fraction: float
    max_examples: int | None
    shard_examples: int
    seed: int


def write_arrays(
    arrays: Mapping[str, Any],
    directory: Path,
    *,
    plan: ArrayPlan,
    source: Mapping[str, Any],
    progress: Callable[[str], None] = lambda _: None,
) -> ArrayManifest:
    """Check, split and write everything into `directory`.

    Args:
        arrays: by name, the first axis counts examples.
        directory: exists and is empty.
        plan: target, split and sizes.
        source: facts about where the arrays came from; kept in the manifest.
        progress: told what is being done.

    Raises:
        ParameterError: arrays of different lengths, no target, values that are no numbers or not finite, negative
            classes, fewer than two examples; lists everything.
    """
    progress("checking")
    checked = check_arrays(arrays, target=plan.target)
    target = checked[plan.target]
    is_classes = target.dtype.kind in "iub"
    chosen = _split(len(target), plan=plan)
    splits = {}
    for name, rows in chosen.items():
        progress(f"writing {name}")
        shards = {
            array: tuple(_write(checked[array], rows, directory, prefix=name, array=array, plan=plan))
            for array in checked
        }
        splits[name] = ArraySplit(num_rows=len(rows), shards=shards)
    manifest = ArrayManifest(
        arrays={name: ArraySpec(shape=array.shape[1:], dtype=array.dtype.name) for name, array in checked.items()},
        target=plan.target,
        target_kind="classes" if is_classes else "values",
        num_classes=int(target.max()) + 1 if is_classes else None,
        seed=plan.seed,
        splits=splits,
        source=dict(source),
    )
    manifest.write(directory)
    return manifest


def check_arrays(arrays: Mapping[str, Any], *, target: str) -> dict[str, Array]:
    """The arrays as numpy in a kept dtype; the target's classes as int64.

    Raises:
        ParameterError: what `write_arrays` says; lists everything.
    """
    complaints: list[str] = []
    if target not in arrays:
        near = nearest_name(target, tuple(map(str, arrays)))
        complaints.append(
            f"no array {target!r} (the target); found: {', '.join(map(str, arrays)) or 'none'}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    elif len(arrays) < 2:
        complaints.append(f"only the target {target!r}, and no array that a model could be given")
    made: dict[str, Array] = {}
    for name, given in arrays.items():
        try:
            made[str(name)] = _kept(str(name), np.asarray(given))
        except ValueError as error:
            complaints.append(str(error))
    lengths = {name: len(array) for name, array in made.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        complaints.append(f"arrays have different numbers of examples: {shown}")
    elif made and next(iter(lengths.values())) < 2:
        complaints.append(f"{next(iter(lengths.values()))} examples; a split needs at least two")
    if target in made and made[target].dtype.kind in "iub":
        made[target] = made[target].astype(np.int64)
        if made[target].size and made[target].min() < 0:
            complaints.append(f"{target}: classes are counted from 0, found {int(made[target].min())}")
    if complaints:
        raise ParameterError(
            f"the arrays make no dataset ({len(complaints)} complaints):\n" + "\n".join(f"  {c}" for c in complaints),
            hint="arrays have numbers, one example in each row, and names that are keywords of the model's forward; "
            "`target` names the one that is predicted",
        )
    return made


def _kept(name: str, array: Array) -> Array:
    """The array in a dtype that is kept.

    Raises:
        ValueError: it holds no numbers, or some that are not finite.
    """
    if not name.isidentifier():
        raise ValueError(f"{name!r}: the name is a keyword of the model's forward, so it must be a Python name")
    if array.ndim < 1:
        raise ValueError(f"{name}: a single number; the first axis must count examples")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: dtype {array.dtype} holds no plain numbers")
    if array.dtype.kind == "f":
        kept = array.astype(np.float32)
        bad = np.argwhere(~np.isfinite(kept))
        if len(bad):
            raise ValueError(f"{name}: {len(bad)} numbers are not finite in float32, the first in example {bad[0][0]}")
        return kept
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {array.max()} does not fit into int64")
    return array if array.dtype.name in _KEPT_DTYPES else array.astype(np.int64)


def _split(num_examples: int, *, plan: ArrayPlan) -> dict[str, npt.NDArray[np.int64]]:
    """Examples of each split: a seeded order, cut; at least one in each."""
    order = shuffled_rows(np.arange(num_examples, dtype=np.int64), num_rows=num_examples, seed=plan.seed)
    kept = order[: plan.max_examples] if plan.max_examples is not None else order
    num_held_out = min(max(1, round(len(kept) * plan.validation_fraction)), len(kept) - 1)
    return {"train": np.sort(kept[num_held_out:]), "validation": np.sort(kept[:num_held_out])}


def _write(
    values: Array, rows: npt.NDArray[np.int64], directory: Path, *, prefix: str, array: str, plan: ArrayPlan
) -> Iterator[ShardEntry]:
    for number, first in enumerate(range(0, len(rows), plan.shard_examples)):
        path = directory / f"{prefix}-{number:05d}.{array}.npy"
        yield write_shard(path, values[rows[first : first + plan.shard_examples]])
