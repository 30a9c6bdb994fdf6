"""How a training process keeps the memory of its host.

Owns the settings of the C library's allocator. Knows nothing of tensors. The one decision: blocks of 4 MB and more go
back to the kernel when they are freed, smaller ones stay, because the next step takes the same again.

glibc's own rule moves with what is freed, up to 32 MB. Large and small blocks then share one heap, which comes to hold
twice what is alive: two ranks of a 42 M model in zero3 took 731 MB above their imports for 422 MB that lived at once,
477 MB with this rule. A step of the 8 M model had 37,700 page faults and 0.09 s in the kernel, and has 29,000 and
0.06 s. Keeping everything is faster still (1,500 faults, 0.01 s) and takes 897 MB; a limit of 1 MB takes 427 MB and
spends 0.55 s of each step in the kernel.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
_NEVER_BYTES = 2**31 - 1
_GROWTH_BYTES = 64 << 20
_LARGE_BYTES = 4 << 20


def keep_freed_memory() -> bool:
    """Let malloc keep small blocks and no large ones, for the rest of this process; False where it is not glibc's."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _NEVER_BYTES), (_TOP_PAD, _GROWTH_BYTES))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
