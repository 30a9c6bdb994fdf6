"""Modules whose projections multiply with packed weights.

Owns the packed projection and its place in the module tree. Knows nothing of compilers or devices. The one decision:
the model stays the one definition; a transformation, for serving alone, puts packed projections where those of the
definition were.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.decoders.layers import Projection
from pipeline.models.packed.calls import support
from pipeline.models.packed.product import COLUMNS, pack, packed_product

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


class PackedProjection(nnx.Module):
    """`x @ kernel + bias`, kernel float32 [blocks, in, 48]."""

    def __init__(self, kernel: jax.Array, *, bias: Any) -> None:
        """Of a kernel [in, out]."""
        self.num_out = kernel.shape[1]
        self.kernel = nnx.Param(pack(kernel))
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., out], float32."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]

    def product(self, x: jax.Array) -> jax.Array:
        """Without the bias."""
        return packed_product(x, self.kernel[...], num_out=self.num_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """How a served model multiplies."""

    is_packed: bool
    reason: str


def choose_products(*, platform: str, dtype: str, num_devices: int = 1) -> Products:
    """Packed weights wherever they can be had: float32 on one CPU device, with a compiler and AVX2.

    Args:
        platform: jax's name of the device, `cpu` or `gpu`.
        dtype: of the weights.
        num_devices: over which one copy of the model lies.
    """
    if platform != "cpu":
        return Products(is_packed=False, reason="XLA's own products, on an accelerator")
    if dtype != "float32":
        return Products(is_packed=False, reason=f"XLA's own products: weights are {dtype}, only float32 is packed")
    if num_devices > 1:
        return Products(is_packed=False, reason=f"XLA's own products: the model lies over {num_devices} devices")
    found = support()
    return Products(is_packed=found.product is not None, reason=found.reason)


def pack_projections(model: ModuleT) -> ModuleT:
    """Put packed projections in the place of `model`'s float32 ones, and return it.

    Those with fewer outputs than a block stay: filling them up would read more than it saves.
    """
    for _, owner in list(nnx.iter_modules(model)):
        for name, child in list(vars(owner).items()):
            if isinstance(child, Projection | nnx.Linear) and _is_packed_well(child.kernel[...]):
                bias = None if child.bias is None else child.bias[...]
                setattr(owner, name, PackedProjection(child.kernel[...], bias=bias))
    return model


def _is_packed_well(kernel: jax.Array) -> bool:
    return kernel.dtype == jnp.float32 and kernel.ndim == 2 and kernel.shape[1] >= COLUMNS
