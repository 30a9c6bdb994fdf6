"""A decoder whose projections are int8.

Owns the quantized projection and its place in the module tree. Knows nothing of files or devices. The one decision: the
model stays the one definition; a transformation puts another projection where the float one was, before parameters are
laid in, so that the float weights of a whole model never exist.

Embeddings, norms, biases and a tied head keep their dtype. Experts' products are grouped and take float weights, so a
model of experts is refused.

Shape suffixes: B rows, I in, O out, S stretches, C numbers of a stretch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.decoders.experts import ExpertMlp
from pipeline.models.decoders.layers import Projection, side_by_side
from pipeline.models.decoders.model import Decoder
from pipeline.models.quantization import quantized_leaf
from pipeline.models.variables import Buffer

STRETCH_NUMBERS = 2**17
"""Of a weight, converted at once on a CPU: 512 KiB of float32 stay in the cache of a core."""
MIN_STRETCH = 8


class QuantizedProjection(nnx.Module):
    """`(x @ kernel) * kernel_scale + bias`; kernel int8 [in, out], kernel_scale float32 [out]."""

    def __init__(self, kernel: Any, *, scale: Any, bias: Any) -> None:
        self.kernel = Buffer(kernel)
        self.kernel_scale = Buffer(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def of(cls, projection: Projection) -> "QuantizedProjection":
        """The same projection in int8; abstract where it is abstract."""
        kernel = projection.kernel.get_value()
        bias = None if projection.bias is None else projection.bias.get_value()
        if isinstance(kernel, jax.ShapeDtypeStruct):
            shape = kernel.shape
            return cls(
                jax.ShapeDtypeStruct(shape, jnp.int8), scale=jax.ShapeDtypeStruct(shape[1:], jnp.float32), bias=bias
            )
        values, scale = quantized_leaf(np.asarray(kernel))
        return cls(jnp.asarray(values), scale=jnp.asarray(scale), bias=bias)

    @classmethod
    def concatenated(cls, parts: "Sequence[QuantizedProjection]", *, shards: int = 1) -> "QuantizedProjection":
        """As `Projection.concatenated`: scales belong to output channels and are laid as these."""
        biases = [part.bias[...] for part in parts if part.bias is not None]
        return cls(
            side_by_side([part.kernel[...] for part in parts], shards=shards),
            scale=side_by_side([part.kernel_scale[...] for part in parts], shards=shards),
            bias=side_by_side(biases, shards=shards) if biases else None,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] to [..., out], in the dtype of `x`."""
        y = self.product(x).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]

    def product(self, x: jax.Array) -> jax.Array:
        """Without the bias: [..., in] to float32 [..., out]."""
        x_BI = x.reshape(-1, x.shape[-1])
        y_BO = jax.lax.platform_dependent(x_BI, self.kernel[...], cpu=_by_stretches, default=at_once)
        return (y_BO * self.kernel_scale[...]).reshape(*x.shape[:-1], -1)


def quantize_projections(model: Decoder) -> Decoder:
    """Put int8 projections in the place of `model`'s, in attention, feed-forward and head, and return it.

    An abstract model stays abstract and allocates nothing.

    Raises:
        ParameterError: the model has experts.
    """
    if any(isinstance(block.mlp, ExpertMlp) for block in model.layers):
        raise ParameterError(
            f"dtype: int8 is not to be had for {model.config.family}: the products of its experts are grouped and take "
            "float weights",
            hint="use dtype: bfloat16 or float32",
        )
    for owner in [model, *(part for block in model.layers for part in (block.attention, block.mlp))]:
        for name, child in list(vars(owner).items()):
            if isinstance(child, Projection):
                setattr(owner, name, QuantizedProjection.of(child))
    return model


def is_quantized(model: nnx.Module) -> bool:
    """True where some projection is int8."""
    return any(isinstance(module, QuantizedProjection) for _, module in nnx.iter_modules(model))


def at_once(x_BI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """One product; XLA:GPU converts the weight on its way into it, which `device.rebuilds_weight` of serving checks."""
    return jnp.matmul(x_BI, kernel_IO.astype(x_BI.dtype), preferred_element_type=jnp.float32)


def _by_stretches(x_BI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Stretches of rows one after the other, each converted and multiplied while it is in the cache.

    XLA:CPU converts a whole weight into memory first: 34 ms for [2048, 4096] and one row, 1.7 ms in stretches, as long
    as the product with the float32 weight takes.
    """
    num_in, num_out = kernel_IO.shape
    size = stretch(num_in, num_out)
    if size == num_in:
        return at_once(x_BI, kernel_IO)
    kernel_SCO = kernel_IO.reshape(-1, size, num_out)
    x_SBC = x_BI.reshape(x_BI.shape[0], -1, size).transpose(1, 0, 2)

    def one_more(y_BO: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y_BO + at_once(*part), None

    y_BO, _ = jax.lax.scan(one_more, jnp.zeros((x_BI.shape[0], num_out), jnp.float32), (x_SBC, kernel_SCO))
    return y_BO


def stretch(num_in: int, num_out: int) -> int:
    """Rows of a stretch: the largest divisor of `num_in` that keeps it small, or all rows where there is none."""
    wanted = max(MIN_STRETCH, STRETCH_NUMBERS // num_out)
    fitting = [size for size in range(MIN_STRETCH, min(wanted, num_in) + 1) if num_in % size == 0]
    return max(fitting, default=num_in)
