"""What a Flax model computes, as numpy arrays by name.

Owns running a described model on a dict of inputs in one jitted call, with and without its taps. Knows nothing of torch
and of checkpoints. The one decision: outputs and inner values come from the same compiled call, at full float32
precision on the CPU, so what is compared inside is what is compared at the end.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from pipeline.models.description import Arrays, ModelDescription
from pipeline.models.variables import recording


class FlaxRunner:
    """A module of a description, compiled once for each shape of its inputs."""

    def __init__(self, description: ModelDescription, module: nnx.Module) -> None:
        graph, state = nnx.split(module)
        self._device = jax.devices("cpu")[0]
        self._state = jax.device_put(state, self._device)

        def outputs(state: Any, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
            with jax.default_matmul_precision("highest"):
                return description.forward(nnx.merge(graph, state), inputs)

        def tapped(state: Any, inputs: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            with recording() as taps:
                given = outputs(state, inputs)
            self._order[:] = taps  # jit gives a dict back in sorted order
            return given, dict(taps)

        self._order: list[str] = []
        self._outputs, self._tapped = jax.jit(outputs), jax.jit(tapped)

    def outputs(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """The float outputs by name."""
        return _arrays(self._outputs(self._state, self._placed(inputs)))

    def outputs_and_taps(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[Arrays, Arrays]:
        """The outputs, and what the modules inside gave, by their paths in the order in which they ran."""
        outputs, taps = self._tapped(self._state, self._placed(inputs))
        arrays = _arrays(taps)
        return _arrays(outputs), {name: arrays[name] for name in self._order}

    def _placed(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, jax.Array]:
        return {name: jax.device_put(array, self._device) for name, array in inputs.items()}


def _arrays(values: Mapping[str, jax.Array]) -> Arrays:
    return {name: np.asarray(value, np.float32) for name, value in values.items()}
