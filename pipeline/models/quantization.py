"""Weights in eight bits.

Owns the numbers: symmetric int8 with one scale for each output channel. Knows no model. The one decision: only weights
are quantized and only by their largest magnitude, so nothing has to be calibrated, a weight is off by at most half a
step, and the scale can multiply the product instead of the weight: `x @ (q * s) = (x @ q) * s`.
"""

import numpy as np
from numpy.typing import NDArray

SCALE_SUFFIX = "_scale"
"""A quantized leaf `P` has its scales at `P_scale`."""
LEVELS = 127
"""-127 to 127: symmetric, so that 0 stays 0 and a sign change is exact."""
_STRETCH_NUMBERS = 2**22
"""Of a leaf, converted at once; the whole leaf in float32 never exists beside the stored one."""


def quantized_leaf(kernel: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`kernel` [in, out] of any float dtype to int8 [in, out] and float32 scales [out].

    `kernel` is `int8 * scale` to within half a scale. A channel of zeros has scale 1.
    """
    num_in, num_out = kernel.shape
    stretches = _stretches(num_in, num_out)
    largest = np.zeros(num_out, np.float32)
    for rows in stretches:
        np.maximum(largest, np.abs(kernel[rows].astype(np.float32)).max(axis=0), out=largest)
    scale = np.where(largest > 0, largest / LEVELS, 1).astype(np.float32)
    made = np.empty(kernel.shape, np.int8)
    for rows in stretches:
        made[rows] = np.clip(np.rint(kernel[rows].astype(np.float32) / scale), -LEVELS, LEVELS)
    return made, scale


def _stretches(num_in: int, num_out: int) -> list[slice]:
    size = max(1, _STRETCH_NUMBERS // max(1, num_out))
    return [slice(start, start + size) for start in range(0, num_in, size)]
