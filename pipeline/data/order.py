"""The global order of training rows: a pure function of (seed, epoch, index).

Owns the shuffle and each rank's part of a step. Keeps no state and knows nothing of files. The one decision: the order
is computed, not stored: a keyed Feistel permutation gives the row at any position in constant memory, so a resumed
run, or one with another world size, continues at the exact row by knowing the step alone.

Shapes: N positions.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUND_KEYS = np.arange(_ROUNDS, dtype=np.uint64) * _GOLDEN
"""Wraps around, as every sum and product here does."""


def rank_positions(step: int, *, rows_per_step: int, rank: int = 0, world_size: int = 1) -> npt.NDArray[np.int64]:
    """Positions in the global order that `rank` reads in step `step` (from 0), int64 [rows_per_step / world_size].

    Ranks take the step's rows by stride, so the union over ranks is the same rows for every world size.
    """
    first = step * rows_per_step
    return np.arange(first + rank, first + rows_per_step, world_size, dtype=np.int64)


def shuffled_rows(positions: npt.NDArray[np.int64], *, num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Row at each position, int64 [N]; positions `e * num_rows ... (e + 1) * num_rows - 1` are a permutation (epoch e).

    A Feistel network over the smallest even number of bits that holds `num_rows`, walked until the value falls below
    `num_rows` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    epochs, index = np.divmod(positions, num_rows)
    keys = _mix(_mix(np.full(len(positions), seed, np.uint64)) + epochs.astype(np.uint64))
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    rows = _permute(index.astype(np.uint64), keys, half_bits)
    outside = rows >= np.uint64(num_rows)
    while outside.any():
        rows[outside] = _permute(rows[outside], keys[outside], half_bits)
        outside = rows >= np.uint64(num_rows)
    return rows.astype(np.int64)


def _permute(
    values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], half_bits: np.uint64
) -> npt.NDArray[np.uint64]:
    mask = np.uint64((1 << int(half_bits)) - 1)
    left, right = values >> half_bits, values & mask
    for round_key in _ROUND_KEYS:
        left, right = right, left ^ (_mix(right + (keys + round_key)) & mask)
    return (left << half_bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
