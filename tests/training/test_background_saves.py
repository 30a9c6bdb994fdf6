"""Saves that go on while training does: the same bytes, told in time, waited for at the end, forgiven a few times."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_files import PLACES, Weather, register
from conftest import TINY_MODEL
from rank_functions import Recorder, StoppedError, StoppingRows, train_recorded
from saving_ranks import save_while_training

from pipeline.artifacts.store import open_store
from pipeline.errors import CheckpointError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.checkpoints.flight import Landing, Written
from pipeline.training.checkpoints.history import SaveHistory
from pipeline.training.checkpoints.interval import SaveInterval, young_interval
from pipeline.training.checkpoints.state_difference import state_differences
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import train

TIMEOUT_SECONDS = 120.0
CLOSE_SECONDS = 0.3
"""Of every file; several steps of the tiny model go by meanwhile."""
WAIT_SECONDS = 60.0
DROPOUT = TINY_MODEL | {"attention_dropout": 0.1}


@pytest.fixture
def storage(tmp_path: Path):
    """`storage(**weather)`: a workspace on a chaos file system, and its weather."""
    register()

    def make(**weather: Any) -> tuple[str, Weather]:
        PLACES[tmp_path.name] = Weather(**weather)
        return f"chaos://{tmp_path.name}", PLACES[tmp_path.name]

    yield make
    PLACES.clear()


def steps_of(workspace: str) -> list[int]:
    return [item.key.step for item in find_resumable(open_store(workspace)).commits]


def test_a_checkpoint_holds_the_step_it_was_begun_at_while_training_goes_on(
    make_job, one_rank, storage, tmp_path: Path
) -> None:
    workspace, _ = storage(close_seconds=CLOSE_SECONDS)
    every = {"model": DROPOUT, "steps": 9, "checkpoint_every_steps": 4, "keep_checkpoints": 9}
    slow, record = train_recorded(one_rank, make_job(workspace=workspace, checkpoint_async=True, **every))
    waited, _ = train_recorded(one_rank, make_job(workspace=tmp_path / "waited", **every))
    ours, theirs = (find_resumable(open_store(str(place))).commits for place in (workspace, tmp_path / "waited"))
    assert [item.key.step for item in ours] == [item.key.step for item in theirs] == [9, 8, 4]
    for mine, other in zip(ours, theirs, strict=True):
        assert state_differences(workspace, mine, other_workspace=str(tmp_path / "waited"), other=other) == [], (
            mine.key.step
        )
    assert slow.state == waited.state
    # Of the save at step 4 training has waited for the copy alone.
    stall, write = record.series("checkpoint_stall_seconds"), record.series("checkpoint_write_seconds")
    assert stall[4] < write[4]
    assert write[4] > CLOSE_SECONDS
    assert set(record.series("checkpoint_commit_seconds")) >= {4, 8}
    ages = record.series("checkpoint_age_seconds")
    assert 4 not in ages  # of no commit there is no age
    assert all(age >= 0.0 for age in ages.values())


@pytest.mark.parametrize("in_background", [True, False])
def test_what_was_reported_is_handed_on_before_its_step_is_committed(
    make_job, one_rank, storage, in_background: bool
) -> None:
    workspace, _ = storage()
    recorder = Recorder()
    found: list[tuple[int, list[int]]] = []

    def hand_on() -> None:
        found.append((max(recorder.series("loss")), steps_of(workspace)))

    job = make_job(workspace=workspace, steps=9, checkpoint_async=in_background)
    train(one_rank, job, reporter=recorder, before_commit=hand_on)
    assert len(found) == 3
    for committed, (reported, steps) in zip((3, 6, 9), found, strict=True):
        assert reported >= committed
        assert committed not in steps


def test_a_training_that_fails_waits_for_the_save_on_its_way(make_job, one_rank, storage, token_rows: Path) -> None:
    workspace, _ = storage(close_seconds=CLOSE_SECONDS)
    stopping = functools.partial(StoppingRows, token_rows, stop_at=4)
    with pytest.raises(StoppedError):
        train(
            one_rank, make_job(workspace=workspace, open_dataset=stopping, checkpoint_async=True), reporter=Recorder()
        )
    assert steps_of(workspace) == [3]


def test_a_save_that_fails_is_told_and_training_goes_on_from_earlier_ones(make_job, one_rank, storage) -> None:
    workspace, weather = storage()

    class Filling(Recorder):
        def metrics(self, values: Any, *, step: int | None = None) -> None:
            if step == 4 and "loss" in values:
                deadline = time.monotonic() + WAIT_SECONDS
                while steps_of(workspace) != [3]:  # until the first save is committed
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                weather.refused_names["__0_0.distcp"] = 1
            super().metrics(values, step=step)

    recorder = Filling()
    result = train(one_rank, make_job(workspace=workspace, steps=9, checkpoint_async=True), reporter=recorder)
    assert steps_of(workspace) == [9, 3]
    assert result.commit.key.step == 9
    (told,) = recorder.notes
    assert told.startswith("the save of step 6 failed, 1 in a row of 3 at most: cannot write step 6: rank 0: ")
    assert "No space left on device" in told
    assert not any("step-00000006" in name for name in weather.held)


def test_the_first_save_may_not_fail(make_job, one_rank, storage) -> None:
    workspace, _ = storage(refused_names={"__0_0.distcp": 1})
    recorder = Recorder()
    with pytest.raises(CheckpointError, match=r"cannot write step 3: rank 0: .*No space left on device"):
        train(one_rank, make_job(workspace=workspace, steps=9, checkpoint_async=True), reporter=recorder)
    assert max(recorder.series("loss")) == 6  # where the next save would have begun
    assert [note for note in recorder.notes if "the save of step 3 failed" not in note] == []


@pytest.mark.parametrize("seconds", [1e-6, "auto"])
def test_saves_are_due_by_the_clock(make_job, one_rank, tmp_path: Path, seconds: Any) -> None:
    job = make_job(checkpoint_interval_seconds=seconds, device_mttf_hours=1e-15, keep_checkpoints=9)
    train_recorded(one_rank, job)
    # auto waits for a first measurement longer than this run takes; its last save is due in any case.
    assert steps_of(str(tmp_path / "workspace")) == ([6] if seconds == "auto" else [6, 5, 4, 3, 2, 1])


def landing(*, stall_seconds: float, write_seconds: float | None, step: int = 1) -> Landing:
    written = None
    if write_seconds is not None:
        written = Written(commit=None, write_seconds=write_seconds, commit_seconds=0.0)
    return Landing(
        step=step, stall_seconds=stall_seconds, written=written, error=None if written else CheckpointError("x")
    )


def test_young_s_interval_is_the_cheapest_one() -> None:
    stall, mttf = 0.4, 30_000.0
    best = young_interval(stall_seconds=stall, mttf_seconds=mttf)

    def lost(interval: float) -> float:
        return stall / interval + interval / (2 * mttf)

    assert best == pytest.approx(154.9, abs=0.1)
    assert lost(best) < min(lost(best * 1.05), lost(best * 0.95))
    auto = SaveInterval(seconds="auto", num_devices=1024, device_mttf_hours=8090.0)
    assert auto.mttf_seconds == pytest.approx(7.9 * 3600, rel=1e-3)
    assert auto.next_seconds(stall_seconds=None, write_seconds=0.0) == 60.0
    assert auto.next_seconds(stall_seconds=0.4, write_seconds=1.0) == pytest.approx(150.9, abs=0.1)
    assert auto.next_seconds(stall_seconds=0.4, write_seconds=500.0) == 500.0  # one save at a time
    assert (
        SaveInterval(seconds=30.0, num_devices=1, device_mttf_hours=1.0).next_seconds(
            stall_seconds=99.0, write_seconds=2.0
        )
        == 30.0
    )


def test_a_save_that_is_due_while_one_is_on_its_way_is_put_off_and_counted_once() -> None:
    history = SaveHistory(interval=SaveInterval(seconds=10.0, num_devices=1, device_mttf_hours=1.0))
    history.begin(at=100.0)
    asked = [history.is_due(now=now, is_flying=now < 130.0) for now in (105.0, 111.0, 129.0, 131.0)]
    assert asked == [False, False, False, True]
    history.end(landing(stall_seconds=0.1, write_seconds=30.0))
    history.begin(at=131.0)
    assert not history.is_due(now=155.0, is_flying=False)  # writing takes 30 s
    assert history.is_due(now=161.5, is_flying=False)
    recorder = Recorder()
    history.report(recorder)
    assert recorder.series("save_skipped") == {1: 1.0}


def test_three_failures_in_a_row_end_training() -> None:
    history = SaveHistory(interval=None, newest=object())  # type: ignore[arg-type]
    for step in (1, 2):
        history.end(landing(stall_seconds=0.1, write_seconds=None, step=step))
        history.check()
    history.end(landing(stall_seconds=0.1, write_seconds=1.0, step=3))
    history.newest = object()  # type: ignore[assignment]
    for step in (4, 5, 6):
        history.check()
        history.end(landing(stall_seconds=0.1, write_seconds=None, step=step))
    with pytest.raises(CheckpointError):
        history.check()


def test_ranks_save_on_a_group_of_their_own_and_agree_on_failure(make_job, tmp_path: Path) -> None:
    first, second = spawn(
        save_while_training,
        make_job(steps=6, checkpoint_every_steps=100, checkpoint_async=True),
        world_size=2,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    # Training reduces on the default group while rank 1 still writes, and both see the same number of such steps.
    assert first.steps_while_saving == second.steps_while_saving > 2
    # One rank fails: both say so, name it, and keep what was committed before.
    assert first.error == second.error == "cannot write step 2: rank 1: No space left on device"
    assert first.committed == second.committed == [1]
    assert not list((tmp_path / "workspace/checkpoints/step-00000002").iterdir())
    assert first.notes[0].startswith("the save of step 2 failed, 1 in a row of 3")
    # Every rank goes on with its own random numbers, of every library; also by the seed of another number of ranks.
    for found in (first, second):
        assert found.draws[0] == found.draws[1]
    for name, mine, other in zip(("saved", "resumed", "seeded"), first.draws, second.draws, strict=True):
        assert all(one != two for one, two in zip(mine, other, strict=True)), name
