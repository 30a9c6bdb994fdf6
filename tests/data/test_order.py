"""The global order of rows: each row once an epoch, any position computable alone, any world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.order import rank_positions, shuffled_rows
from pipeline.data.windowed_order import WindowedOrder


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


@pytest.mark.parametrize("shuffled_shards", [None, 2])
def test_each_row_comes_once_an_epoch_across_resumes_at_any_world_size(shuffled_shards: int | None) -> None:
    """Stops at three points, two of them in one epoch, and each time goes on with another number of ranks."""
    shards, rows_per_step, num_epochs, seed = [11, 5, 11, 10], 8, 3, 4
    num_rows = sum(shards)  # 37: every epoch ends inside a step
    num_steps = -(-num_epochs * num_rows // rows_per_step)
    taken: dict[int, list[int]] = {}
    lives = [(0, 3, 1), (2, 6, 2), (6, 9, 4), (7, num_steps, 2)]  # from the checkpoint's step, until, ranks
    for first, until, world_size in lives:
        for step in range(first, until):
            parts = [
                rank_positions(step, rows_per_step=rows_per_step, rank=rank, world_size=world_size)
                for rank in range(world_size)
            ]
            if shuffled_shards is None:
                rows = [shuffled_rows(part, num_rows=num_rows, seed=seed).tolist() for part in parts]
            else:
                order = WindowedOrder(shard_rows=shards, shuffled_shards=shuffled_shards, seed=seed)
                rows = [order.rows(part).tolist() for part in parts]
            # In the order of positions, which ranks take by stride.
            again = [row for together in zip(*rows, strict=True) for row in together]
            assert taken.setdefault(step, again) == again
    seen = [row for step in range(num_steps) for row in taken[step]]
    for epoch in range(num_epochs):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert seen[:num_rows] != seen[num_rows : 2 * num_rows]


def test_a_window_reads_few_shards_and_says_which_are_next() -> None:
    shards, window = [7, 3, 9, 4, 6], 2
    order = WindowedOrder(shard_rows=shards, shuffled_shards=window, seed=1)
    shard_of = np.repeat(np.arange(len(shards)), shards)
    read = shard_of[order.rows(np.arange(2 * sum(shards)))]
    for position, shard in enumerate(read):
        here, after = order.shards_near(position)
        assert shard in here
        assert len(here) <= window
        if position + 1 < len(read) and read[position + 1] not in here:
            assert read[position + 1] in after
    assert not np.array_equal(np.sort(read[:7]), read[:7])  # rows of a window's shards are mixed
