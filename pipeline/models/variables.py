"""What of a module is a leaf, and how its inner values are seen.

Owns the kinds of variables that a checkpoint holds, and the taps by which parity looks inside a forward pass. Knows no
model. The one decision: a value is tapped by the name of the module that made it, so a comparison layer by layer needs
no hooks into either framework's internals, and costs nothing where nobody listens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx


class Buffer(nnx.Variable[Any]):
    """A value that a checkpoint holds and no gradient reaches (torch's `register_buffer`)."""


LEAVES = (nnx.Param, nnx.BatchStat, Buffer)
"""Every kind of variable that a checkpoint holds. Random state is none of them."""

_taps: ContextVar[dict[str, Any] | None] = ContextVar("taps", default=None)


@contextmanager
def recording() -> Iterator[dict[str, jax.Array]]:
    """Collect, by name, what `tap` sees inside the block.

    Inside a jitted function the values are tracers: return a copy of the dict from that function.
    """
    taps: dict[str, Any] = {}
    token = _taps.set(taps)
    try:
        yield taps
    finally:
        _taps.reset(token)


def tap(name: str, value: Any) -> Any:
    """Give `value` back unchanged; under `recording` also note it as the output of the module at path `name`."""
    taps = _taps.get()
    if taps is not None:
        taps[name] = value
    return value
