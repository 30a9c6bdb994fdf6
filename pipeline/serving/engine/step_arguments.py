"""From a scheduled step to the arrays that an executable takes.

Owns the host arrays and their padding. Knows nothing of devices. The one decision: a setting of `Sampling` enters its
array here and nowhere else, for the sampler after a prefill and for decode alike.

Shape suffixes: B batch, T chunk tokens, N tokens of a shared pass, S slots, E stop ids, W 32-bit words of a mask, M
adjusted tokens.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.serving.engine.request import MAX_STOP_IDS, Sampling
from pipeline.serving.engine.sampling import SamplingRows
from pipeline.serving.engine.scheduler import Decode, Prefill, Shared
from pipeline.serving.engine.step_functions import Rows
from pipeline.serving.engine.token_choice import ChoiceRows
from pipeline.serving.engine.token_rules import NOT_SEEN, TokenRules

_NO_STOP = -1
_WORD_BITS = 32
_EMPTY = Decode(rows=(), steps=0, padded_to=0, attention_length=0)


def prefill_arguments(step: Prefill) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [1, T], and slot, first position and number of tokens as int32 [3]."""
    tokens_BT = np.zeros((1, step.padded_to), np.int32)
    tokens_BT[0, : len(step.tokens)] = step.tokens
    return tokens_BT, np.asarray([step.slot, step.start, len(step.tokens)], np.int32)


def shared_arguments(step: Shared, *, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `StepFunctions.shared`.

    Returns:
        Token, slot and position of each row, int32 [3, N]; how many of them, and of the next, are no padding, int32
        [2]; the rows that the tokens of `step.asking` follow, int32 [S].
    """
    placed_3N = np.zeros((3, step.padded_to), np.int32)
    ends: list[int] = []
    count = 0
    for row in step.rows:
        placed_3N[:, count] = row.token, row.slot, row.position
        ends.append(count)
        count += 1
    for one in step.prefills:
        within = slice(count, count + len(one.tokens))
        placed_3N[0, within], placed_3N[1, within] = one.tokens, one.slot
        placed_3N[2, within] = np.arange(one.start, one.start + len(one.tokens))
        count += len(one.tokens)
        if one.is_last:
            ends.append(count - 1)
    ends_S = np.zeros(slots, np.int32)
    ends_S[: len(ends)] = ends
    return placed_3N, np.asarray([count, len(ends)], np.int32), ends_S


def copy_arguments(step: Prefill) -> tuple[np.ndarray, np.ndarray]:
    """The slots, from and to, as int32 []."""
    return np.asarray(step.copies_from, np.int32), np.asarray(step.slot, np.int32)


def places(step: Decode, *, slots: int) -> list[int]:
    """Where each row of the step stands in the batch: at its slot where the batch has one row for each."""
    return [row.slot if step.padded_to == slots else index for index, row in enumerate(step.rows)]


def decode_arguments(step: Decode, *, sampling: Sequence[Sampling], places: Sequence[int]) -> tuple[Rows, np.ndarray]:
    """The rows at their places, padded to the bucket, and the number of steps as int32 []."""
    return _rows(step, sampling=sampling, places=places, size=step.padded_to), np.asarray(step.steps, np.int32)


def choice_arguments(
    rules: Sequence[TokenRules],
    *,
    positions: Sequence[int],
    places: Sequence[int],
    size: int,
    num_adjusted: int,
    num_tokens: int,
) -> ChoiceRows:
    """Of rows whose tokens go to `positions`, padded with greedy rows that wish nothing.

    Args:
        rules: of each row.
        positions: of each row's token.
        places: of each row in the batch.
        size: of the batch.
        num_adjusted: M, the most tokens whose logits one row changes.
        num_tokens: V.
    """
    positions_B = np.zeros(size, np.int32)
    positions_B[list(places)] = positions
    mask_BW = np.full((size, -(-num_tokens // _WORD_BITS)), 0xFFFFFFFF, np.uint32)
    token_BM = np.full((size, num_adjusted), num_tokens, np.int32)
    count_BM = np.full((size, num_adjusted), NOT_SEEN, np.int32)
    bias_BM = np.zeros((size, num_adjusted), np.float32)
    penalties = np.zeros((3, size), np.float32)
    penalties[0] = 1.0
    for index, rule in zip(places, rules, strict=True):
        how, counts = rule.sampling, rule.counts
        penalties[:, index] = how.repetition_penalty, how.presence_penalty, how.frequency_penalty
        if rule.mask_W is not None:
            mask_BW[index] = rule.mask_W
        if counts is not None:
            token_BM[index, : counts.size] = counts.tokens[: counts.size]
            count_BM[index, : counts.size] = counts.counts[: counts.size]
            bias_BM[index, : counts.size] = counts.bias[: counts.size]
    return ChoiceRows(
        sampling=sampling_rows([rule.sampling for rule in rules], places=places, size=size),
        position_B=positions_B,
        mask_BW=mask_BW,
        token_BM=token_BM,
        count_BM=count_BM,
        bias_BM=bias_BM,
        repetition_B=penalties[0],
        presence_B=penalties[1],
        frequency_B=penalties[2],
        wants_logprobs=np.asarray(any(rule.sampling.logprobs is not None for rule in rules)),
    )


def idle_choice(size: int, *, num_adjusted: int, num_tokens: int) -> ChoiceRows:
    """Of a batch in which no row wishes anything."""
    return choice_arguments((), positions=(), places=(), size=size, num_adjusted=num_adjusted, num_tokens=num_tokens)


def idle_prefill(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Arguments of a chunk bucket that write nothing: no token counts."""
    return np.zeros((1, size), np.int32), np.zeros(3, np.int32)


def idle_shared(size: int, *, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of a shared pass that writes nothing: no token counts."""
    return np.zeros((3, size), np.int32), np.zeros(2, np.int32), np.zeros(slots, np.int32)


def idle_decode(size: int) -> tuple[Rows, np.ndarray]:
    """Arguments of a batch bucket that write nothing: every budget is 0."""
    return _rows(_EMPTY, sampling=(), places=(), size=size), np.asarray(0, np.int32)


def sampling_rows(sampling: Sequence[Sampling], *, places: Sequence[int], size: int) -> SamplingRows:
    """Settings of each row, padded with greedy rows."""
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    top_k, min_p, seed = np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, np.uint32)
    for index, how in zip(places, sampling, strict=True):
        temperature[index], top_k[index], top_p[index] = how.temperature, how.top_k, how.top_p
        min_p[index], seed[index] = how.min_p, how.seed & 0xFFFFFFFF
    return SamplingRows(temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p, seed_B=seed)


def _rows(step: Decode, *, sampling: Sequence[Sampling], places: Sequence[int], size: int) -> Rows:
    columns = np.zeros((4, size), np.int32)
    stop_BE = np.full((size, MAX_STOP_IDS), _NO_STOP, np.int32)
    for index, row, how in zip(places, step.rows, sampling, strict=True):
        columns[:, index] = row.slot, row.token, row.position, row.budget
        stop_BE[index, : len(how.stop_ids)] = how.stop_ids
    return Rows(
        columns[0], columns[1], columns[2], columns[3], stop_BE, sampling_rows(sampling, places=places, size=size)
    )
