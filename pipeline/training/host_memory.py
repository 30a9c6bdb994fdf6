"""How a training process keeps the memory of its host.

Owns the settings of the C library's allocator. Knows nothing of tensors. The one decision: what a step frees stays
with the process, because the next step takes the same again. Left alone, glibc gives large blocks back to the kernel,
which clears them page by page when they are taken anew: 37,000 page faults in a step of the 8 M model, 5 % of its
processor time. The most that a process holds is what it was (1,037 and 1,044 MB at the peak).
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
_NEVER_BYTES = 2**31 - 1
_GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, for the rest of this process; False where the C library is not glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER_BYTES), (_TOP_PAD, _GROWTH_BYTES))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
