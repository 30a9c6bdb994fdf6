"""How a training process keeps the memory of its host.

Owns the settings of the C library's allocator. Knows nothing of tensors. The one decision: blocks of 8 MB and more go
back to the kernel when they are freed, smaller ones stay, because the next step takes the same again.

glibc's own rule moves with what is freed, up to 32 MB. Large and small blocks then share one heap, which comes to hold
twice what is alive. By `pipeline bench train --only speed,memory` on two cores, with the limit at 4, 8, 12 and 32 MB:
0.905, 0.978, 0.995 and 0.996 of a bare loop's tokens a second, and a rank of a 42 M model in zero3 holds 580, 643, 709
and 935 MB above its libraries.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
_NEVER_BYTES = 2**31 - 1
_GROWTH_BYTES = 64 << 20
_LARGE_BYTES = 8 << 20


def keep_freed_memory() -> bool:
    """Let malloc keep small blocks and no large ones, for the rest of this process; False where it is not glibc's."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _NEVER_BYTES), (_TOP_PAD, _GROWTH_BYTES))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
