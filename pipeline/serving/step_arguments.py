"""From a scheduled step to the arrays that an executable takes.

Owns the host arrays and their padding. Knows nothing of devices. The one decision: a setting of `Sampling` enters its
array here and nowhere else, for the sampler after a prefill and for decode alike.

Shape suffixes: B batch, T chunk tokens, E stop ids.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.serving.request import MAX_STOP_IDS, Sampling
from pipeline.serving.sampling import SamplingRows
from pipeline.serving.scheduler import Decode, Prefill
from pipeline.serving.step_functions import Rows

_NO_STOP = -1
_EMPTY = Decode(rows=(), steps=0, padded_to=0, attention_length=0)


def prefill_arguments(step: Prefill) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [1, T], and slot, first position and number of tokens as int32 [3]."""
    tokens_BT = np.zeros((1, step.padded_to), np.int32)
    tokens_BT[0, : len(step.tokens)] = step.tokens
    return tokens_BT, np.asarray([step.slot, step.start, len(step.tokens)], np.int32)


def decode_arguments(step: Decode, *, sampling: Sequence[Sampling]) -> tuple[Rows, np.ndarray]:
    """The rows, padded to the bucket, and the number of steps as int32 []."""
    return _rows(step, sampling=sampling, size=step.padded_to), np.asarray(step.steps, np.int32)


def sampler_arguments(sampling: Sequence[Sampling], *, position: int) -> tuple[SamplingRows, np.ndarray]:
    """Of one row whose token goes to `position`."""
    return sampling_rows(sampling, size=1), np.asarray([position], np.int32)


def idle_prefill(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Arguments of a chunk bucket that write nothing: no token counts."""
    return np.zeros((1, size), np.int32), np.zeros(3, np.int32)


def idle_decode(size: int) -> tuple[Rows, np.ndarray]:
    """Arguments of a batch bucket that write nothing: every budget is 0."""
    return _rows(_EMPTY, sampling=(), size=size), np.asarray(0, np.int32)


def sampling_rows(sampling: Sequence[Sampling], *, size: int) -> SamplingRows:
    """Settings of each row, padded with greedy rows."""
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    top_k, seed = np.zeros(size, np.int32), np.zeros(size, np.uint32)
    for index, how in enumerate(sampling):
        temperature[index], top_k[index], top_p[index] = how.temperature, how.top_k, how.top_p
        seed[index] = how.seed & 0xFFFFFFFF
    return SamplingRows(temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, seed_B=seed)


def _rows(step: Decode, *, sampling: Sequence[Sampling], size: int) -> Rows:
    columns = np.zeros((4, size), np.int32)
    stop_BE = np.full((size, MAX_STOP_IDS), _NO_STOP, np.int32)
    for index, (row, how) in enumerate(zip(step.rows, sampling, strict=True)):
        columns[:, index] = row.slot, row.token, row.position, row.budget
        stop_BE[index, : len(how.stop_ids)] = how.stop_ids
    return Rows(columns[0], columns[1], columns[2], columns[3], stop_BE, sampling_rows(sampling, size=size))
