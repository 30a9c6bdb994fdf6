"""Rows are split into passes: every row once, little padding, only compiled shapes."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.engine.buckets import smallest_fit
from pipeline.serving.engine.forward_executor import batch_sizes, length_sizes
from pipeline.serving.engine.passes import Pass, PassShapes

SPLITTING = PassShapes(batches=(1, 4, 16, 32), lengths=(16, 32, 48, 64, 96, 128), most_tokens=1024, tokens_of_pass=12)
WHOLE = PassShapes(batches=(1, 4, 16, 32), lengths=(16, 32, 64, 128))


@given(st.lists(st.integers(1, 128), min_size=1, max_size=32), st.sampled_from([SPLITTING, WHOLE]))
def test_every_row_is_in_one_pass_of_a_compiled_shape_that_holds_it(lengths, shapes):
    passes = shapes.split(lengths)
    assert sorted(row for one in passes for row in one.rows) == list(range(len(lengths)))
    for one in passes:
        assert (one.batch, one.length) in shapes.compiled()
        assert 1 <= len(one.rows) <= one.batch
        assert max(lengths[row] for row in one.rows) <= one.length


def cost(passes, shapes):
    return sum(shapes.tokens_of_pass + one.batch * one.length for one in passes)


@given(st.lists(st.integers(1, 128), min_size=1, max_size=64), st.sampled_from([0, 12, 64, 1000]))
def test_no_other_split_of_rows_in_order_costs_less(lengths, tokens_of_pass):
    shapes = replace(SPLITTING, tokens_of_pass=tokens_of_pass)
    padded = sorted((smallest_fit(length, shapes.lengths) for length in lengths), reverse=True)

    @functools.cache
    def least(begin):
        if begin >= len(padded):
            return 0
        sizes = shapes.batches_of(padded[begin])
        return min(tokens_of_pass + size * padded[begin] + least(begin + size) for size in sizes)

    assert cost(shapes.split(lengths), shapes) == least(0)


def test_rows_of_like_length_go_together_where_a_pass_costs_little():
    assert SPLITTING.split([10, 40, 12, 9, 41]) == [
        Pass(rows=(4,), batch=1, length=48),
        Pass(rows=(1,), batch=1, length=48),
        Pass(rows=(2, 0, 3), batch=4, length=16),
    ]


def test_rows_of_any_length_go_together_where_a_pass_costs_more_than_padding():
    shapes = replace(SPLITTING, tokens_of_pass=64)
    assert shapes.split([10, 40, 12, 9, 41]) == [
        Pass(rows=(4, 1, 2, 0), batch=4, length=48),
        Pass(rows=(3,), batch=1, length=16),
    ]


def test_shorter_rows_take_places_that_are_left_over():
    assert replace(SPLITTING, tokens_of_pass=40).split([40, 41, 42, 9]) == [Pass(rows=(2, 1, 0, 3), batch=4, length=48)]


def test_where_a_pass_costs_the_same_whatever_is_in_it_all_rows_are_one():
    assert WHOLE.split([10, 100, 5]) == [Pass(rows=(0, 1, 2), batch=4, length=128)]


def test_shapes_without_a_length_are_split_by_batch_alone():
    assert PassShapes(batches=(2, 8)).compiled() == [(2, 0), (8, 0)]
    assert PassShapes(batches=(2, 8)).split([0, 0, 0]) == [Pass(rows=(0, 1, 2), batch=8, length=0)]


def test_only_shapes_within_the_limit_are_compiled():
    keys = SPLITTING.compiled()
    assert (32, 32) in keys and (32, 48) not in keys and (1, 128) in keys
    assert PassShapes(batches=(4, 8), lengths=(512,), most_tokens=1024).compiled() == [(4, 512)]


def test_a_row_that_fits_nowhere_is_an_error():
    for shapes in (SPLITTING, WHOLE):
        with pytest.raises(ValueError, match="129"):
            shapes.split([129])
    with pytest.raises(ValueError, match="33"):
        WHOLE.split([1] * 33)


def test_lengths_grow_by_a_half_and_a_third_in_turn():
    assert length_sizes(256) == (16, 32, 48, 64, 96, 128, 192, 256)
    assert length_sizes(100) == (16, 32, 48, 64, 96, 100)
    assert length_sizes(8) == (8,)
    assert batch_sizes(32) == (1, 4, 16, 32)
