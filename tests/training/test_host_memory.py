"""Small blocks that are freed stay with the process, large ones do not."""

import subprocess
import sys

MIB = 2**20
PAGES_OF_A_ROUND = 64 * MIB // 4096

COUNT = """
import ctypes, resource
from pipeline.training.host_memory import keep_freed_memory

library = ctypes.CDLL(None)
library.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 2 MiB would hide what is counted
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

def take(number, size):
    blocks = [library.malloc(size) for _ in range(number)]
    for block in blocks:
        library.memset(block, 1, size)
    for block in blocks:
        library.free(block)

def of_a_round():
    take(64, 1 << 20)
    before = faults()
    take(64, 1 << 20)
    return faults() - before

fresh = of_a_round()
kept = keep_freed_memory()
after = of_a_round()
before = resident()
take(8, 16 << 20)  # more than the heap holds already
print(fresh, int(kept), after, resident() - before)
"""


def test_small_blocks_are_not_cleared_anew_and_large_ones_go_back() -> None:
    found = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True, timeout=60)
    fresh, kept, after, grown_mib = map(int, found.stdout.split())
    assert kept
    assert fresh > PAGES_OF_A_ROUND / 2
    assert after < PAGES_OF_A_ROUND / 10
    assert grown_mib < 8
