"""Freed memory, given back to the system.

Owns one call of the C library. Knows nothing of who freed what. The one decision: work that is bounded by design says
itself when it has let go of much; the allocator alone keeps blocks of up to 32 MB for later, in a heap for each thread,
and converting 370 MB with leaves of 8 MB then held 140 MB at its peak instead of 70.
"""

import ctypes
import sys

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back() -> None:
    """Return free pages of every heap; does nothing where the C library has no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
