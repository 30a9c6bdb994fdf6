"""Our custom calls in XLA's programs on CPUs: whether this process can make them, and by which names.

Owns loading and registering the library. Knows nothing of what the calls compute. The one decision: where they cannot
be made, the reason is a value, because XLA's own operations compute the same.
"""

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import jax

from pipeline.models.packed.building import build
from pipeline.settings import cache_directory

_CALLS = ("PackedProduct", "CachedAttention")
_WIDE = 2
_LEVELS = {1: ("2", "AVX2"), _WIDE: ("512", "AVX-512")}
_ONCE = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether this process can make the calls."""

    product: str | None
    """The name of the product of `product.py`; None where it cannot."""
    attention: str | None
    """The name of the attention of `attention.py`; None where it cannot."""
    reason: str


def support() -> Support:
    """Compile, load and register the custom calls, once a process; where that is not to be had, say why."""
    with _ONCE:
        return _support(str(cache_directory(os.environ)))


@functools.cache
def _support(directory: str, *, most: int = _WIDE) -> Support:
    library = build(Path(directory), headers=Path(jax.ffi.include_dir()), environment=os.environ)
    if library.path is None:
        return _none(f"XLA's own products: {library.reason}")
    try:
        loaded = ctypes.CDLL(str(library.path))
    except OSError as error:
        return _none(f"XLA's own products: {library.path} does not load: {error}")
    level = min(loaded.PackedProductLevel(), most)
    if level not in _LEVELS:
        return _none("XLA's own products: the processor has neither AVX-512 nor AVX2 with FMA")
    suffix, instructions = _LEVELS[level]
    names = [name + suffix for name in _CALLS]
    # An executable in the compile cache names its target: other sources must have other names.
    targets = [f"pipeline_{name}_{library.digest}" for name in names]
    for name, target in zip(names, targets, strict=True):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    reason = f"weights laid out for {instructions}, {library.reason}"
    return Support(product=targets[0], attention=targets[1], reason=reason)


def _none(reason: str) -> Support:
    return Support(product=None, attention=None, reason=reason)
