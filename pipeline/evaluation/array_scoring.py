"""How well a model predicts held-out examples.

Owns the loop over batches, and the formulas of loss and accuracy. Numpy only; knows nothing of frameworks, datasets or
stages. The one decision: sums are float64 over single examples, so the batch size cannot change the result.

Shape suffixes: N examples, K classes; targets are [N, ...], logits [N, K, ...].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import log_softmax

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayScores:
    """What was found."""

    losses: tuple[float, ...]
    """Of each example, in the given order: nats for classes, squared difference for values."""
    accuracies: tuple[float, ...]
    """Share of each example's classes that is right; empty for values."""
    confusion: NDArray[np.int64] | None
    """Counts [class, predicted class]; None for values."""

    @property
    def loss(self) -> float:
        """Mean over examples."""
        return math.fsum(self.losses) / len(self.losses)

    @property
    def accuracy(self) -> float | None:
        """Mean over examples; None for values."""
        return math.fsum(self.accuracies) / len(self.accuracies) if self.accuracies else None


def score_arrays(
    predict: Callable[[Arrays], NDArray[Any]],
    *,
    read: Callable[[NDArray[np.int64]], Arrays],
    rows: NDArray[np.int64],
    target: str,
    num_classes: int | None,
    batch_rows: int,
    progress: Callable[[int, float], None] | None = None,
) -> ArrayScores:
    """Score examples batch by batch.

    Args:
        predict: gives logits [N, K, ...] or values [N, ...] of the inputs.
        read: gives every array of the examples with these indices.
        rows: which examples, at least one.
        target: name of the array that is predicted.
        num_classes: of the target; None where it is a value.
        batch_rows: examples read and scored at a time.
        progress: told examples done and the loss so far.

    Raises:
        ValueError: the model's output does not have the target's shape.
    """
    losses: list[float] = []
    accuracies: list[float] = []
    confusion = None if num_classes is None else np.zeros((num_classes, num_classes), np.int64)
    total = 0.0
    for start in range(0, len(rows), batch_rows):
        arrays = read(rows[start : start + batch_rows])
        targets = arrays[target]
        outputs = predict({name: array for name, array in arrays.items() if name != target})
        if confusion is None:
            found = _squared(outputs, targets)
        else:
            found, right = _classified(outputs, targets, confusion=confusion)
            accuracies += right
        losses += found
        total += math.fsum(found)
        if progress is not None:
            progress(len(losses), total / len(losses))
    return ArrayScores(losses=tuple(losses), accuracies=tuple(accuracies), confusion=confusion)


def _squared(outputs: NDArray[Any], targets: NDArray[Any]) -> list[float]:
    if outputs.shape != targets.shape:
        raise ValueError(f"the model gives {list(outputs.shape)}, the target has {list(targets.shape)}")
    squares = np.square(outputs.astype(np.float64) - targets)
    return _by_example(squares)


def _classified(
    outputs: NDArray[Any], targets: NDArray[Any], *, confusion: NDArray[np.int64]
) -> tuple[list[float], list[float]]:
    num_classes = len(confusion)
    if outputs.ndim != targets.ndim + 1 or (outputs.shape[0], *outputs.shape[2:]) != targets.shape:
        raise ValueError(f"the model gives {list(outputs.shape)}, the target has {list(targets.shape)}")
    if outputs.shape[1] < num_classes:
        raise ValueError(f"the model has {outputs.shape[1]} classes, the target {num_classes}")
    log_probabilities = log_softmax(np.moveaxis(outputs, 1, -1))
    losses = -np.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    predicted = log_probabilities.argmax(axis=-1)
    # Classes that no example has are all "another one".
    np.add.at(confusion, (targets.ravel(), np.minimum(predicted, num_classes - 1).ravel()), 1)
    return _by_example(losses), _by_example((predicted == targets).astype(np.float64))


def _by_example(values: NDArray[Any]) -> list[float]:
    return [float(value) for value in values.reshape(len(values), -1).mean(axis=1)]
