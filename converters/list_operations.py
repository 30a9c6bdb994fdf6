"""Reversible steps between one tensor and several, and on several side by side.

Owns stacking and the application of one step to each of a list. Knows nothing of names, families or files. The one
decision: how many tensors there are is part of the operation, so a checkpoint that lacks one of its experts is refused
by its headers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from converters.operations import Array, Operation, Shape


@dataclass(frozen=True, slots=True)
class Stack:
    """Join `count` tensors of one shape along a new first axis."""

    count: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """One new array."""
        self.shapes([a.shape for a in arrays])
        return [np.stack(arrays)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs `count` equal shapes."""
        if len(shapes) != self.count:
            raise ValueError(f"stacks {self.count} tensors, got {len(shapes)}")
        if len(set(shapes)) != 1:
            raise ValueError(f"stacks tensors of one shape, found {sorted(set(shapes))}")
        return [(self.count, *shapes[0])]

    def inverted(self) -> "Unstack":
        """Take them apart again."""
        return Unstack(self.count)


@dataclass(frozen=True, slots=True)
class Unstack:
    """Take a tensor apart along its first axis, which is `count` long."""

    count: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """Views."""
        self.shapes([a.shape for a in arrays])
        return list(arrays[0])

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs one tensor."""
        if len(shapes) != 1 or not shapes[0] or shapes[0][0] != self.count:
            raise ValueError(f"takes one tensor whose first axis is {self.count}, found {list(shapes)}")
        return [shapes[0][1:]] * self.count

    def inverted(self) -> Stack:
        """Join them again."""
        return Stack(self.count)


@dataclass(frozen=True, slots=True)
class Each:
    """The first operation on the first tensor, the second on the second, and so on; each takes one and makes one."""

    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        if len(set(self.operations)) == 1:
            return f"Each({len(self.operations)} x {self.operations[0]})"
        return f"Each({', '.join(map(str, self.operations))})"

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """As many arrays as were given."""
        self.shapes([a.shape for a in arrays])
        pairs = zip(self.operations, arrays, strict=True)
        return [made for operation, array in pairs for made in operation.apply([array])]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs as many tensors as there are operations."""
        if len(shapes) != len(self.operations):
            raise ValueError(f"takes {len(self.operations)} tensors, got {len(shapes)}")
        pairs = zip(self.operations, shapes, strict=True)
        return [made for operation, shape in pairs for made in operation.shapes([shape])]

    def inverted(self) -> "Each":
        """The inverse of each."""
        return Each(tuple(operation.inverted() for operation in self.operations))
