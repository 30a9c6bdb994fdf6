"""`x @ w` with a weight that was laid out for it, as an XLA custom call on CPUs.

Owns the layout, the call, and whether this machine can make it. Knows no module. The one decision: the weight is laid
out once, at load, in the order in which a product reads it. XLA's product copies the whole weight into such an order at
every call, which for a few rows takes longer than the product.

Shape suffixes: B rows, I in, O out, P blocks of `COLUMNS` columns, C columns of a block.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.packed.building import build
from pipeline.settings import cache_directory

COLUMNS = 48
"""Of a block; three AVX-512 registers."""
_WIDE = 2
_HANDLERS = {1: ("PackedProduct2", "AVX2"), _WIDE: ("PackedProduct512", "AVX-512")}
_ONCE = threading.Lock()
_count: ContextVar[Any] = ContextVar("count", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether this process can make the call."""

    target: str | None
    """The custom call's name; None where it cannot."""
    reason: str


def support() -> Support:
    """Compile, load and register the custom call, once a process; where that is not to be had, say why."""
    with _ONCE:
        return _support(str(cache_directory(os.environ)))


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
    target = support().target
    if target is None:
        raise RuntimeError(f"products of packed weights cannot be computed here: {support().reason}")
    x_BI = x.reshape(-1, x.shape[-1])
    form = jax.ShapeDtypeStruct((x_BI.shape[0], num_out), jnp.float32)
    count = _count.get()
    count = jnp.int32(x_BI.shape[0]) if count is None else jnp.asarray(count, jnp.int32)
    y_BO = jax.ffi.ffi_call(target, form)(x_BI, kernel_PIC, count)
    return y_BO.reshape(*x.shape[:-1], num_out)


@functools.cache
def _support(directory: str, *, most: int = _WIDE) -> Support:
    library = build(Path(directory), headers=Path(jax.ffi.include_dir()), environment=os.environ)
    if library.path is None:
        return Support(target=None, reason=f"XLA's own products: {library.reason}")
    try:
        loaded = ctypes.CDLL(str(library.path))
    except OSError as error:
        return Support(target=None, reason=f"XLA's own products: {library.path} does not load: {error}")
    level = min(loaded.PackedProductLevel(), most)
    if level not in _HANDLERS:
        return Support(target=None, reason="XLA's own products: the processor has neither AVX-512 nor AVX2 with FMA")
    name, instructions = _HANDLERS[level]
    # An executable in the compile cache names its target: another source must have another name.
    target = f"pipeline_{name}_{library.digest}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return Support(target=target, reason=f"weights laid out for {instructions}, {library.reason}")
