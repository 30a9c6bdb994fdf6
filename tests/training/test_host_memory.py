"""What is freed stays with the process."""

import subprocess
import sys

FAULTS_OF_ONE_BLOCK = 64 * 2**20 // 4096

COUNT = """
import ctypes, resource, sys
from pipeline.training.host_memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        block = library.malloc(64 << 20)
        library.memset(block, 1, 64 << 20)
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
kept = keep_freed_memory()
faults()
print(fresh, int(kept), faults())
"""


def test_a_block_that_was_freed_is_not_cleared_anew() -> None:
    found = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True, timeout=60)
    fresh, kept, after = map(int, found.stdout.split())
    assert kept
    assert fresh >= 4 * FAULTS_OF_ONE_BLOCK
    assert after < FAULTS_OF_ONE_BLOCK / 10
