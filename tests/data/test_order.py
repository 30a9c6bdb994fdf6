"""The global order of rows: each row once an epoch, any position computable alone, any world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.order import rank_positions, shuffled_rows


@given(num_rows=st.integers(1, 700), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    rows = shuffled_rows(np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows=num_rows, seed=seed)
    assert sorted(rows) == list(range(num_rows))


@given(num_rows=st.integers(2, 500), seed=st.integers(0, 100), positions=st.lists(st.integers(0, 10_000), min_size=1))
def test_a_position_has_the_same_row_whoever_else_is_asked(num_rows: int, seed: int, positions: list[int]) -> None:
    together = shuffled_rows(np.array(positions), num_rows=num_rows, seed=seed)
    alone = [shuffled_rows(np.array([item]), num_rows=num_rows, seed=seed)[0] for item in positions]
    assert list(together) == alone


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = shuffled_rows(np.arange(1000), num_rows=1000, seed=0)
    assert not np.array_equal(first, shuffled_rows(np.arange(1000, 2000), num_rows=1000, seed=0))
    assert not np.array_equal(first, shuffled_rows(np.arange(1000), num_rows=1000, seed=1))


def test_the_order_is_mixed_well_enough_that_neighbours_part() -> None:
    rows = shuffled_rows(np.arange(10_000), num_rows=10_000, seed=0)
    correlation = np.corrcoef(rows[:-1], rows[1:])[0, 1]
    assert abs(correlation) < 0.03  # three deviations of an unordered sequence of this length


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_read_the_same_rows_for_every_world_size(world_size: int) -> None:
    parts = [
        rank_positions(step, rows_per_step=8, rank=rank, world_size=world_size)
        for step in range(3)
        for rank in range(world_size)
    ]
    assert sorted(np.concatenate(parts)) == list(range(24))


def test_a_huge_dataset_needs_no_table_of_its_rows() -> None:
    rows = shuffled_rows(np.arange(5), num_rows=10**12, seed=0)
    assert len(set(rows.tolist())) == 5
    assert rows.max() < 10**12
