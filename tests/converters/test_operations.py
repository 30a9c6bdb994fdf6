"""Every operation has an exact inverse, says its shapes, and refuses what it cannot undo."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.operations import (
    FLOAT_DTYPES,
    Cast,
    Concatenate,
    DeinterleaveRope,
    InterleaveRope,
    Operation,
    Pad,
    Reshape,
    Split,
    Transpose,
    Unpad,
)

BYTES_PER_NUMBER = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def random_bits(shape: Sequence[int], *, dtype: str, seed: int) -> np.ndarray:
    """Numbers of every kind, infinities included, not-a-numbers left out."""
    rng = np.random.default_rng(seed)
    kind = BYTES_PER_NUMBER[dtype]
    bits = rng.integers(0, np.iinfo(kind).max, size=shape, dtype=kind, endpoint=True)
    array = bits.view(FLOAT_DTYPES[dtype]).reshape(shape)
    return np.where(np.isnan(array.astype(np.float32)), np.zeros((), array.dtype), array)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_undone(operation: Operation, arrays: list[np.ndarray]) -> list[np.ndarray]:
    made = operation.apply(arrays)
    assert [a.shape for a in made] == operation.shapes([a.shape for a in arrays])
    back = operation.inverted().apply(made)
    assert [(a.shape, a.dtype, bits(a)) for a in back] == [(a.shape, a.dtype, bits(a)) for a in arrays]
    assert operation.inverted().inverted() == operation
    return made


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(BYTES_PER_NUMBER))
seeds = st.integers(0, 2**32 - 1)


@given(shape=shapes, dtype=dtypes, seed=seeds, data=st.data())
def test_transpose_comes_back(shape, dtype, seed, data):
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    assert_undone(Transpose(axes), [random_bits(shape, dtype=dtype, seed=seed)])


@given(shape=shapes, dtype=dtypes, seed=seeds, data=st.data())
def test_reshape_comes_back(shape, dtype, seed, data):
    after = tuple(data.draw(st.permutations(shape)))
    assert_undone(Reshape(before=shape, after=after), [random_bits(shape, dtype=dtype, seed=seed)])


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), axis=st.integers(0, 2), dtype=dtypes, seed=seeds)
def test_split_and_concatenate_come_back(sizes, axis, dtype, seed):
    shape = [3, 2, 4]
    shape[axis] = sum(sizes)
    pieces = assert_undone(Split(axis, tuple(sizes)), [random_bits(shape, dtype=dtype, seed=seed)])
    assert_undone(Concatenate(axis, tuple(sizes)), pieces)


@given(heads=st.integers(1, 5), half=st.integers(1, 5), columns=st.integers(1, 4), dtype=dtypes, seed=seeds)
def test_rope_orders_come_back(heads, half, columns, dtype, seed):
    rows = random_bits((heads * 2 * half, columns), dtype=dtype, seed=seed)
    assert_undone(InterleaveRope(heads), [rows])
    assert_undone(DeinterleaveRope(heads), [rows])


@given(shape=shapes, amount=st.integers(1, 3), dtype=dtypes, seed=seeds, data=st.data())
def test_padding_comes_back(shape, amount, dtype, seed, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    padded = assert_undone(Pad(axis, amount), [random_bits(shape, dtype=dtype, seed=seed)])
    assert_undone(Unpad(axis, amount), padded)


@given(shape=shapes, narrow=st.sampled_from(["bfloat16", "float16"]), seed=seeds)
def test_widening_casts_come_back(shape, narrow, seed):
    cast = Cast(before=narrow, after="float32")
    assert cast.is_exact
    assert_undone(cast, [random_bits(shape, dtype=narrow, seed=seed)])


def test_narrowing_casts_do_not_claim_to_come_back():
    cast = Cast(before="float32", after="bfloat16")
    assert not cast.is_exact
    assert not Cast(before="float16", after="bfloat16").is_exact
    (rounded,) = cast.apply([np.float32([1.4321])])
    assert rounded.dtype == ml_dtypes.bfloat16
    assert float(rounded[0]) == 1.4296875


def rotated(head: np.ndarray, *, position: int, interleaved: bool) -> np.ndarray:
    """Rotary embedding at base 10000, written out for one head."""
    half = len(head) // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    first, second = (head[0::2], head[1::2]) if interleaved else (head[:half], head[half:])
    turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    return np.stack(turned, axis=1).reshape(-1) if interleaved else np.concatenate(turned)


def test_interleaved_model_needs_permuted_rows_c3():
    """head_dim 4, q at position 1 and k at position 0: 1.3818 is right, 0.5403 is what a missing permutation gives."""
    q_H, k_H = np.array([1.0, 0.0, 0.0, 0.0]), np.array([1.0, 0.0, 1.0, 0.0])
    right = rotated(q_H, position=1, interleaved=False) @ rotated(k_H, position=0, interleaved=False)
    wrong = rotated(q_H, position=1, interleaved=True) @ rotated(k_H, position=0, interleaved=True)
    permuted_q, permuted_k = (InterleaveRope(1).apply([x])[0] for x in (q_H, k_H))
    repaired = rotated(permuted_q, position=1, interleaved=True) @ rotated(permuted_k, position=0, interleaved=True)
    assert round(float(right), 4) == 1.3818
    assert round(float(wrong), 4) == 0.5403
    assert round(float(repaired), 4) == 1.3818
    assert InterleaveRope(1).apply([np.arange(4)])[0].tolist() == [0, 2, 1, 3]


def test_keys_are_permuted_by_their_own_number_of_heads_c4():
    """n_heads 8, n_kv 2, head_dim 6: 8 // 2 = 4 heads also divides the 12 rows, and is wrong."""
    rows = np.arange(12)
    right = InterleaveRope(2).apply([rows])[0]
    assert right.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    with pytest.raises(ValueError, match="4 heads of an even size"):
        InterleaveRope(4).shapes([rows.shape])


def test_unpad_refuses_to_lose_numbers():
    with pytest.raises(ValueError, match="not zero padding"):
        Unpad(0, 1).apply([np.float32([1, 2])])


@pytest.mark.parametrize(
    ("operation", "given_shapes", "complaint"),
    [
        (Transpose((1, 0)), [(2, 3, 4)], "do not permute"),
        (Reshape((2, 3), (6,)), [(3, 2)], "expects shape"),
        (Reshape((2, 3), (5,)), [(2, 3)], "different sizes"),
        (Split(0, (2, 2)), [(5,)], "not the sum"),
        (Split(1, (2,)), [(2,)], "axis 1 does not exist"),
        (Concatenate(0, (1, 2)), [(1,)], "joins 2 tensors, got 1"),
        (Concatenate(0, (1, 2)), [(1, 3), (2, 4)], "expects shapes"),
        (Unpad(0, 3), [(3,)], "not longer than the padding"),
        (Transpose((0,)), [(1,), (1,)], "takes one tensor"),
    ],
)
def test_shapes_that_do_not_fit_are_named(operation, given_shapes, complaint):
    with pytest.raises(ValueError, match=complaint):
        operation.shapes(given_shapes)


def test_cast_refuses_another_dtype_than_recorded():
    with pytest.raises(ValueError, match="expects dtype bfloat16, found float32"):
        Cast(before="bfloat16", after="float32").apply([np.zeros(1, np.float32)])
