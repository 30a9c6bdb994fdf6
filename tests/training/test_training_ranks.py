"""Two gloo ranks in processes of their own: equal to one rank, bit-equal to themselves, and never left waiting."""

import functools
import time
from pathlib import Path

import pytest
import torch
from rank_functions import (
    StoppingRows,
    fail_on_rank,
    stored_tensors,
    straight_and_interrupted,
    train_recorded,
)

from pipeline.errors import ClusterError, StageError
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import take_step
from pipeline.training.session import open_session
from pipeline.training.worker import joined

TIMEOUT_SECONDS = 120.0
WORLD_TOLERANCE = 5e-5
"""Relative; float32 sums in another order. Measured: 4e-6 after 6 steps. AVG taken for SUM would be off by 2."""
NOTICE_SECONDS = 60.0
"""A lost rank is noticed when its pipe closes; without that the others would wait 300 s in the collective."""


def test_two_ranks_resume_bit_for_bit_and_one_rank_takes_over(make_job, one_rank, token_rows: Path, tmp_path: Path):
    straight = make_job(workspace=tmp_path / "straight")
    stopping = functools.partial(StoppingRows, token_rows, stop_at=4)
    stopped = make_job(workspace=tmp_path / "resumed", open_dataset=stopping)
    resumed = make_job(workspace=tmp_path / "resumed")
    outcomes = spawn(
        straight_and_interrupted, straight, stopped, resumed, world_size=2, timeout_seconds=TIMEOUT_SECONDS
    )
    first, first_record, second, second_record, step = outcomes[0]

    # Both ranks say the same.
    assert outcomes[1][0].state == first.state
    assert outcomes[1][4] == step

    # Resumed at the same world size: bit-equal.
    assert second.resumed_from_step == 3
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert second_record.series(name) == {s: v for s, v in first_record.series(name).items() if s > 3}, name
    ours = stored_tensors(tmp_path / "resumed", second.commit)
    theirs = stored_tensors(tmp_path / "straight", first.commit)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name

    # One rank computes the same step: same loss, and a gradient norm that no world size has scaled.
    with joined(one_rank):
        outcome = take_step(open_session(one_rank, make_job(workspace=tmp_path / "single")), 0)
    assert [outcome.gradient_norm, float(outcome.loss_sum)] == pytest.approx(step, rel=WORLD_TOLERANCE)

    # One rank goes on from what two ranks have committed.
    (tmp_path / "resumed" / second.commit.key.prefix / "COMMIT.json").unlink()
    taken, taken_record = train_recorded(one_rank, resumed)
    assert taken.resumed_from_step == 3
    assert taken.state.world_size == 1
    rates = first_record.series("learning_rate")
    assert taken_record.series("learning_rate") == {s: v for s, v in rates.items() if s > 3}
    expected = [v for s, v in first_record.series("loss").items() if s > 3]
    assert list(taken_record.series("loss").values()) == pytest.approx(expected, rel=WORLD_TOLERANCE)


@pytest.mark.parametrize(
    ("how", "error", "found"),
    [("raise", StageError, "rank 1: ValueError.*a bug of rank 1"), ("kill", ClusterError, "rank 1 died")],
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(how: str, error: type, found: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=found):
        spawn(fail_on_rank, 1, how, world_size=2, timeout_seconds=TIMEOUT_SECONDS)
    assert time.monotonic() - started < NOTICE_SECONDS
