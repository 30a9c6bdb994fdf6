"""Activations by their name in transformers.

Owns which formula a name stands for. Knows no model. The one decision: `gelu` is the exact one and only the names that
say so are its tanh approximation; they differ by up to 5e-4, which has the right shape and the wrong values.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax

Activation = Callable[[jax.Array], jax.Array]


def _quick_gelu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(1.702 x)` (github.com/hendrycks/GELUs)."""
    return x * jax.nn.sigmoid(1.702 * x)


_EXACT_GELU: Activation = partial(jax.nn.gelu, approximate=False)
_TANH_GELU: Activation = partial(jax.nn.gelu, approximate=True)

ACTIVATION_BY_NAME: Mapping[str, Activation] = {
    "gelu": _EXACT_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_python": _EXACT_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jax.numpy.tanh,
}
