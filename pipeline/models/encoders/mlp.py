"""The feed-forward network of a transformer layer: two products with an activation between.

Owns the module. Knows no model.
"""

import jax
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME


class Mlp(nnx.Module):
    """`fc2(activation(fc1(x)))`."""

    def __init__(self, *, size: int, inner: int, activation: str, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(size, inner, rngs=rngs)
        self.fc2 = nnx.Linear(inner, size, rngs=rngs)
        self.activation = ACTIVATION_BY_NAME[activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D]."""
        return self.fc2(self.activation(self.fc1(x)))
