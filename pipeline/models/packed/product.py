"""`x @ w` with a weight that was laid out for it, as an XLA custom call on CPUs.

Owns the layout and the call. Knows no module. The one decision: the weight is laid out once, at load, in the order in
which a product reads it. XLA's product copies the whole weight into such an order at every call, which for a few rows
takes longer than the product.

Shape suffixes: B rows (T of one sequence, in `real_rows`), I in, O out, P blocks of `COLUMNS` columns, C columns of a
block.
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
_counted: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar("counted", default=())


@jax.jit
def pack(kernel_IO: jax.Array) -> jax.Array:
    """float32 [in, out] as [blocks, in, 48]; the last block is filled up with zeros."""
    num_in, num_out = kernel_IO.shape
    filled = jnp.pad(kernel_IO, ((0, 0), (0, -num_out % COLUMNS)))
    return filled.reshape(num_in, -1, COLUMNS).transpose(1, 0, 2)


@contextmanager
def counting_rows(count: Any, *, order_B: Any = None) -> Iterator[None]:
    """While this is traced, only the first `count` rows (an int32 []) of each packed product are computed.

    The others become zero. For a model whose rows behind `count` fill up a shape and are read by nobody. Where
    `order_B`, a permutation, is given, it is the first `count` rows that it names, in products of as many rows as it
    has; all others are as they were.
    """
    token = _counted.set(((count, order_B), *_counted.get()))
    try:
        yield
    finally:
        _counted.reset(token)


def real_rows(mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a mask [B, T] that is 0 where a token is padding: how many tokens are none, and an order that has them first.

    Both are for `counting_rows` and products of B * T rows.
    """
    is_padding = (mask_BT == 0).reshape(-1)
    order = jnp.argsort(is_padding, stable=True).astype(jnp.int32)
    return is_padding.size - jnp.sum(is_padding, dtype=jnp.int32), order


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
    num_rows = x_BI.shape[0]
    fitting = (one for one in _counted.get() if one[1] is None or one[1].shape[0] == num_rows)
    count, order_B = next(fitting, (num_rows, None))
    order_B = jnp.arange(num_rows, dtype=jnp.int32) if order_B is None else order_B
    y_BO = jax.ffi.ffi_call(target, form)(x_BI, kernel_PIC, order_B, jnp.asarray(count, jnp.int32))
    return y_BO.reshape(*x.shape[:-1], num_out)
