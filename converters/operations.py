"""Reversible steps on tensors: what a rule may do besides renaming.

Owns the arithmetic of layouts. Knows nothing of names, families or files. The one decision: every operation has an
exact inverse, itself an operation, so a checkpoint can always go back bit for bit. Scaling constants into weights is
not an operation, because it has no exact inverse in bfloat16.

Every operation maps a list of arrays to a list of arrays (a split makes several of one), and the list of their shapes
likewise, so that a whole conversion is planned and refused before a byte of weights is read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes a weight may have, by the name used in reports; a dtype policy casts these alone."""

DTYPES: dict[str, np.dtype[Any]] = {
    **FLOAT_DTYPES,
    **{
        name: np.dtype(name)
        for name in (
            "float64",
            *("int64", "int32", "int16", "int8"),
            *("uint64", "uint32", "uint16", "uint8"),
            "bool",
            "complex64",
        )
    },
}
"""Dtypes a tensor may have; those that are no weights (counters, masks, tables) are never cast."""

_EXACT_WIDENINGS = {("bfloat16", "float32"), ("float16", "float32")}


class Operation(Protocol):
    """One reversible step."""

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays after the step; may be views."""
        ...

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes after the step.

        Raises:
            ValueError: arrays of these shapes do not fit; says what would.
        """
        ...

    def inverted(self) -> "Operation":
        """The step that undoes this one."""
        ...


def _only(shapes: Sequence[Shape]) -> Shape:
    if len(shapes) != 1:
        raise ValueError(f"takes one tensor, got {len(shapes)}")
    return shapes[0]


def _axis(shape: Shape, axis: int) -> int:
    if not 0 <= axis < len(shape):
        raise ValueError(f"axis {axis} does not exist in shape {shape}")
    return axis


@dataclass(frozen=True, slots=True)
class Transpose:
    """Permute axes as `numpy.transpose` does; `Transpose((1, 0))` turns a torch Linear into a Flax kernel."""

    axes: tuple[int, ...]

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """A transposed view."""
        self.shapes([a.shape for a in arrays])
        return [np.transpose(arrays[0], self.axes)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs one tensor with as many axes as `axes`."""
        shape = _only(shapes)
        if sorted(self.axes) != list(range(len(shape))):
            raise ValueError(f"axes {self.axes} do not permute a tensor of shape {shape}")
        return [tuple(shape[axis] for axis in self.axes)]

    def inverted(self) -> "Transpose":
        """By the inverse permutation."""
        return Transpose(tuple(self.axes.index(axis) for axis in range(len(self.axes))))


@dataclass(frozen=True, slots=True)
class Reshape:
    """Change the shape `before` to `after`, in row-major order; both are given because the way back needs both."""

    before: Shape
    after: Shape

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """The same elements in the new shape."""
        self.shapes([a.shape for a in arrays])
        return [arrays[0].reshape(self.after)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs exactly `before`."""
        shape = _only(shapes)
        if shape != self.before:
            raise ValueError(f"expects shape {self.before}, found {shape}")
        if math.prod(self.before) != math.prod(self.after):
            raise ValueError(f"{self.before} and {self.after} have different sizes")
        return [self.after]

    def inverted(self) -> "Reshape":
        """From `after` to `before`."""
        return Reshape(before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class Split:
    """Cut one tensor along `axis` into pieces of `sizes`, in order."""

    axis: int
    sizes: tuple[int, ...]

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """Views of the pieces."""
        self.shapes([a.shape for a in arrays])
        return list(np.split(arrays[0], np.cumsum(self.sizes)[:-1], axis=self.axis))

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs one tensor whose `axis` is the sum of `sizes`."""
        shape = _only(shapes)
        axis = _axis(shape, self.axis)
        if shape[axis] != sum(self.sizes):
            raise ValueError(f"axis {axis} of shape {shape} is not the sum of {self.sizes}")
        return [(*shape[:axis], size, *shape[axis + 1 :]) for size in self.sizes]

    def inverted(self) -> "Concatenate":
        """Put the pieces together again."""
        return Concatenate(axis=self.axis, sizes=self.sizes)


@dataclass(frozen=True, slots=True)
class Concatenate:
    """Join tensors along `axis`, in order; their lengths there are `sizes`."""

    axis: int
    sizes: tuple[int, ...]

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """One new array."""
        self.shapes([a.shape for a in arrays])
        return [np.concatenate(list(arrays), axis=self.axis)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs as many tensors as `sizes`, equal on every other axis."""
        if len(shapes) != len(self.sizes):
            raise ValueError(f"joins {len(self.sizes)} tensors, got {len(shapes)}")
        axis = _axis(shapes[0], self.axis)
        expected = [(*shapes[0][:axis], size, *shapes[0][axis + 1 :]) for size in self.sizes]
        if list(shapes) != expected:
            raise ValueError(f"expects shapes {expected}, found {list(shapes)}")
        return [(*shapes[0][:axis], sum(self.sizes), *shapes[0][axis + 1 :])]

    def inverted(self) -> Split:
        """Cut at the same places."""
        return Split(axis=self.axis, sizes=self.sizes)


def _rope_rows(shape: Shape, num_heads: int) -> int:
    if not shape or shape[0] % (2 * num_heads):
        raise ValueError(f"axis 0 of shape {shape} does not hold {num_heads} heads of an even size")
    return shape[0] // (2 * num_heads)


@dataclass(frozen=True, slots=True)
class InterleaveRope:
    """Rows of each head from half-split order `[x0..xh, y0..yh]` to interleaved `[x0, y0, x1, y1, ...]`.

    `num_heads` is the number of heads in *this* tensor: for keys that is `num_key_value_heads`, and neither
    `num_attention_heads` nor their quotient.
    """

    num_heads: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """A new array with the rows in interleaved order."""
        (rows,) = arrays
        half = _rope_rows(rows.shape, self.num_heads)
        grouped = rows.reshape(self.num_heads, 2, half, *rows.shape[1:])
        return [grouped.swapaxes(1, 2).reshape(rows.shape)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs axis 0 to be `num_heads` times an even head size."""
        _rope_rows(_only(shapes), self.num_heads)
        return list(shapes)

    def inverted(self) -> "DeinterleaveRope":
        """Back to half-split order."""
        return DeinterleaveRope(self.num_heads)


@dataclass(frozen=True, slots=True)
class DeinterleaveRope:
    """Rows of each head from interleaved to half-split order; the inverse of `InterleaveRope`."""

    num_heads: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """A new array with the rows in half-split order."""
        (rows,) = arrays
        half = _rope_rows(rows.shape, self.num_heads)
        grouped = rows.reshape(self.num_heads, half, 2, *rows.shape[1:])
        return [grouped.swapaxes(1, 2).reshape(rows.shape)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs axis 0 to be `num_heads` times an even head size."""
        _rope_rows(_only(shapes), self.num_heads)
        return list(shapes)

    def inverted(self) -> InterleaveRope:
        """Back to interleaved order."""
        return InterleaveRope(self.num_heads)


@dataclass(frozen=True, slots=True)
class Pad:
    """Append `amount` zero slices at the end of `axis` (a vocabulary rounded up, say)."""

    axis: int
    amount: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """A new, longer array."""
        self.shapes([a.shape for a in arrays])
        widths = [(0, self.amount if axis == self.axis else 0) for axis in range(arrays[0].ndim)]
        return [np.pad(arrays[0], widths)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Lengthens `axis`."""
        shape = _only(shapes)
        axis = _axis(shape, self.axis)
        return [(*shape[:axis], shape[axis] + self.amount, *shape[axis + 1 :])]

    def inverted(self) -> "Unpad":
        """Remove them."""
        return Unpad(axis=self.axis, amount=self.amount)


@dataclass(frozen=True, slots=True)
class Unpad:
    """Remove `amount` slices at the end of `axis`, which must be zero: anything else would be lost."""

    axis: int
    amount: int

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """A view without the padding.

        Raises:
            ValueError: what would be removed is not padding.
        """
        self.shapes([a.shape for a in arrays])
        kept, removed = np.split(arrays[0], [arrays[0].shape[self.axis] - self.amount], axis=self.axis)
        if np.ascontiguousarray(removed).view(np.uint8).any():
            raise ValueError(f"the last {self.amount} slices of axis {self.axis} are not zero padding")
        return [kept]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Needs more than `amount` on `axis`."""
        shape = _only(shapes)
        axis = _axis(shape, self.axis)
        if shape[axis] <= self.amount:
            raise ValueError(f"axis {axis} of shape {shape} is not longer than the padding, {self.amount}")
        return [(*shape[:axis], shape[axis] - self.amount, *shape[axis + 1 :])]

    def inverted(self) -> Pad:
        """Append zeros again."""
        return Pad(axis=self.axis, amount=self.amount)


@dataclass(frozen=True, slots=True)
class Cast:
    """Change the dtype; the original is recorded. Bit-exact both ways only where `is_exact` says so.

    Not-a-number payloads are outside the promise: hardware quiets signalling NaNs when it widens them.
    """

    before: str
    after: str

    @property
    def is_exact(self) -> bool:
        """True where every finite value and infinity survives the way there and back."""
        return self.before == self.after or (self.before, self.after) in _EXACT_WIDENINGS

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """New arrays, rounded to nearest even where the dtype is narrower.

        Raises:
            ValueError: an array has another dtype than `before`.
        """
        for array in arrays:
            if array.dtype != DTYPES[self.before]:
                raise ValueError(f"expects dtype {self.before}, found {array.dtype}")
        return [array.astype(DTYPES[self.after], copy=False) for array in arrays]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Leaves shapes alone."""
        return list(shapes)

    def inverted(self) -> "Cast":
        """Back to the recorded dtype."""
        return Cast(before=self.after, after=self.before)
