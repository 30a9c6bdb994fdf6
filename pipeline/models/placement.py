"""Where the leaves of a model lie, and what of the stored leaves goes there.

Owns the way of a leaf from the disk to the devices that keep it. Knows no model. The one decision: what a process reads
follows from the shardings alone: of each leaf the stretch that its own devices keep, and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding
from numpy.typing import NDArray

from pipeline.models.description import ModelDescription
from pipeline.models.parameter_reader import Index

Placement = Callable[[str, tuple[int, ...]], Sharding]
"""Sharding of the leaf at a dotted path with a shape."""


def _as_stored(_: str, index: Index) -> Index:
    return index


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a stored model is laid out on several devices."""

    description: ModelDescription
    """Of the model as it is placed; its leaves have the stored paths, and may have other shapes."""
    sharding: Placement
    """Of each leaf as it is placed."""
    stored: Callable[[str, Index], Index] = _as_stored
    """Which stretch of the stored leaf is laid down at a stretch of the placed one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedLeaf:
    """One leaf and its devices, before it is read."""

    path: str
    shape: tuple[int, ...]
    sharding: Sharding
    layout: Layout

    @property
    def wanted(self) -> Index:
        """The stretch of the stored leaf that this process reads."""
        return self.layout.stored(self.path, _hull(self._own, self.shape))

    def put(self, part: NDArray[Any]) -> jax.Array:
        """The leaf on its devices, from what was `wanted`; each device is sent its own part and nothing else."""
        start = [one.start for one in self.wanted]

        def cut(index: Index) -> NDArray[Any]:
            stored = self.layout.stored(self.path, _closed(index, self.shape))
            return part[tuple(slice(one.start - at, one.stop - at) for one, at in zip(stored, start, strict=True))]

        return jax.make_array_from_callback(self.shape, self.sharding, cut)

    @property
    def _own(self) -> list[Index]:
        return list(self.sharding.addressable_devices_indices_map(self.shape).values())


def placed_leaves(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[PlacedLeaf]:
    """The leaves of a model by dotted path, with the devices of each."""
    for path, shape in shapes.items():
        yield PlacedLeaf(path=path, shape=shape, sharding=layout.sharding(path, shape), layout=layout)


def _closed(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))


def _hull(indices: list[Index], shape: tuple[int, ...]) -> Index:
    """The smallest stretch that holds all; devices of one process are neighbours on their axis."""
    closed = [_closed(index, shape) for index in indices]
    return tuple(
        slice(min(one[dim].start for one in closed), max(one[dim].stop for one in closed)) for dim in range(len(shape))
    )
