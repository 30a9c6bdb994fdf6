"""`x @ w` with a weight that was laid out for it, as an XLA custom call on CPUs.

Owns the layout and the call. Knows no module. The one decision: the weight is laid
out once, at load, in the order in which a product reads it. XLA's product copies the whole weight into such an order at
every call, which for a few rows takes longer than the product.

Shape suffixes: B rows, I in, O out, P blocks of `COLUMNS` columns, C columns of a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.packed.calls import support

COLUMNS = 48
"""Of a block; three AVX-512 registers."""
_count: ContextVar[Any] = ContextVar("count", default=None)


def pack(kernel_IO: jax.Array) -> jax.Array:
    """float32 [in, out] as [blocks, in, 48]; the last block is filled up with zeros."""
    num_in, num_out = kernel_IO.shape
    filled = jnp.pad(kernel_IO, ((0, 0), (0, -num_out % COLUMNS)))
    return filled.reshape(num_in, -1, COLUMNS).transpose(1, 0, 2)


@contextmanager
def counting_rows(count: Any) -> Iterator[None]:
    """While this is traced, only the first `count` rows (an int32 []) of each packed product are computed.

    The others become zero. For a model whose rows behind `count` fill up a shape and are read by nobody.
    """
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def packed_product(x: jax.Array, kernel_PIC: jax.Array, *, num_out: int) -> jax.Array:
    """[..., in] to [..., out], float32; the kernel is that of `pack`.

    A number of the result does not depend on how many rows there are, nor on the number of threads.

    Raises:
        RuntimeError: this machine cannot; ask `support` first.
    """
    target = support().product
    if target is None:
        raise RuntimeError(f"products of packed weights cannot be computed here: {support().reason}")
    x_BI = x.reshape(-1, x.shape[-1])
    form = jax.ShapeDtypeStruct((x_BI.shape[0], num_out), jnp.float32)
    count = _count.get()
    count = jnp.int32(x_BI.shape[0]) if count is None else jnp.asarray(count, jnp.int32)
    y_BO = jax.ffi.ffi_call(target, form)(x_BI, kernel_PIC, count)
    return y_BO.reshape(*x.shape[:-1], num_out)
