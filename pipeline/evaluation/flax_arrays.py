"""A Flax model of arrays, judged.

Owns the forward pass in fixed batches, and which of a model's outputs is judged. Knows nothing of checkpoints, metrics
or torch. The one decision: products run at full float32 precision, as they do where text is judged.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.models.description import ModelDescription

LOGITS = "logits"


class FlaxArrays:
    """`predict(inputs) -> outputs` of the one output that is judged.

    Args:
        description: of the model.
        module: with float32 parameters.
        device: where it runs.
        batch_rows: rows in one forward pass; fewer are padded, more are cut into several passes.
    """

    def __init__(
        self, description: ModelDescription, module: nnx.Module, *, device: jax.Device, batch_rows: int
    ) -> None:
        graph, state = nnx.split(module)
        self._state = jax.device_put(state, device)
        self._device = device
        self._batch_rows = batch_rows

        def forward(state: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
            with jax.default_matmul_precision("highest"):
                outputs = description.forward(nnx.merge(graph, state), inputs)
            return outputs[judged_output(tuple(outputs), model=description.name)]

        self._forward = jax.jit(forward)

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """[N, ...] of inputs [N, ...]."""
        num_rows, size = len(next(iter(inputs.values()))), self._batch_rows
        parts = []
        for start in range(0, num_rows, size):
            part = {name: array[start : start + size] for name, array in inputs.items()}
            num_real = min(size, num_rows - start)
            padded = {
                name: np.concatenate([array, np.repeat(array[:1], size - num_real, axis=0)])
                for name, array in part.items()
            }
            parts.append(np.asarray(self._forward(self._state, jax.device_put(padded, self._device)))[:num_real])
        return np.concatenate(parts)


def judged_output(names: tuple[str, ...], *, model: str) -> str:
    """The output called `logits`, or the only one.

    Raises:
        ParameterError: there are several, and none is called `logits`.
    """
    if LOGITS in names:
        return LOGITS
    if len(names) == 1:
        return names[0]
    raise ParameterError(
        f"{model}: gives {', '.join(names)}; which of them is the prediction?",
        hint=f"return one tensor from forward, or a mapping with {LOGITS!r}",
    )
