"""One rank that meets a fault: what training does about it, and what a user is told."""

import functools
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_functions import Recorder, train_recorded

from pipeline.artifacts.store import open_store
from pipeline.data.array_writing import ArrayPlan, write_arrays
from pipeline.data.arrays import ArrayDataset
from pipeline.errors import ClusterError, Interrupted, ParameterError, PreemptedError, StageError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.config import TrainConfig
from pipeline.training.fault_policy import FaultPolicy, NonFinitePolicy
from pipeline.training.faults.failpoints import VARIABLE, FailpointError
from pipeline.training.faults.out_of_memory import noted_rows, rows_were_cut
from pipeline.training.faults.requests import Flag, ask
from pipeline.training.loop import _enough_memory, train
from pipeline.training.observation import validate
from pipeline.training.session import TrainJob
from pipeline.training.tasks.watched_rows import WatchedRows, read_rows

MICRO_BATCH_TOLERANCE = 2e-5
"""Relative; float32 sums in another order. Measured: up to 3e-6 after 6 steps."""


def non_finite(skip: int, then: str = "stop") -> FaultPolicy:
    return FaultPolicy(non_finite=NonFinitePolicy(skip=skip, then=then))


@pytest.fixture
def fail_at(monkeypatch):
    def arm(text: str) -> None:
        monkeypatch.setenv(VARIABLE, text)

    return arm


class SpoiledRows:
    """Arrays with an infinite value in the rows of one position of the data."""

    def __init__(self, path: Path, *, position: int) -> None:
        self._rows, self._position = ArrayDataset.open(path), position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, **options: Any) -> Any:
        rows = self._rows.train_rows(step, **options)
        return rows | {"pixels": rows["pixels"] * np.float32(np.inf)} if step == self._position else rows


@pytest.fixture
def spoiled_job(tmp_path: Path):
    """A network with batch normalization; the rows of its fifth step are spoiled."""
    rng = np.random.default_rng(0)
    arrays = {
        "pixels": rng.normal(size=(80, 1, 3, 4)).astype(np.float32),
        "weight": np.ones(80, np.float32),
        "labels": rng.integers(0, 3, size=80),
    }
    plan = ArrayPlan(target="labels", validation_fraction=0.25, max_examples=None, shard_examples=40, seed=0)
    (tmp_path / "arrays").mkdir()
    write_arrays(arrays, tmp_path / "arrays", plan=plan, source={})

    def make(*, workspace: Path = tmp_path / "workspace", **fields: Any) -> TrainJob:
        config = TrainConfig(
            model="trained_modules:make",
            model_arguments={"width": 3},
            steps=8,
            global_batch_examples=4,
            micro_batch_sequences=4,
            learning_rate=1e-2,
            warmup_steps=0,
            checkpoint_every_steps=3,
            log_every_steps=1,
            **fields,
        )
        rows = functools.partial(SpoiledRows, tmp_path / "arrays", position=4)
        here = str(Path(__file__).parent)
        return TrainJob(config=config, workspace=str(workspace), open_dataset=rows, project_root=here)

    return make


def commits(workspace: Path) -> list[int]:
    return [item.key.step for item in find_resumable(open_store(str(workspace))).commits]


def test_a_bad_step_stops_training_and_names_its_rows(make_job, one_rank, fail_at) -> None:
    fail_at("gradients@step=4:nan")
    with pytest.raises(StageError) as caught:
        train_recorded(one_rank, make_job())
    assert "step 5 of 6: the gradient norm is nan; parameters are those of step 4" in caught.value.message
    (found,) = re.findall(r"rows of train: ([\d, ]+)", caught.value.message)
    dataset = make_job().open_dataset()
    taken = dataset.train_rows(4, rows_per_step=8, rank=0, world_size=1, seed=0)
    named = dataset.rows("train", np.array([int(row) for row in found.split(", ")]))
    assert sorted(map(bytes, named)) == sorted(map(bytes, taken))


def test_a_skipped_step_changes_nothing_and_schedule_and_data_go_on(make_job, one_rank, fail_at, tmp_path) -> None:
    logs = {name: tmp_path / f"log-{name}" for name in ("bad", "good")}

    def job(name: str):
        rows = functools.partial(WatchedRows, make_job().open_dataset, log_directory=logs[name])
        return make_job(workspace=tmp_path / name, open_dataset=rows, faults=non_finite(skip=1))

    good, good_record = train_recorded(one_rank, job("good"))
    fail_at("gradients@step=2:nan; gradients@step=4:nan")
    bad, record = train_recorded(one_rank, job("bad"))
    assert (bad.skipped_steps, good.skipped_steps) == (2, 0)
    assert record.series("skipped_steps") == {3: 1.0, 5: 2.0}
    assert sum("skipped (rows of train: " in note for note in record.notes) == 2
    assert record.series("learning_rate") == good_record.series("learning_rate")
    assert read_rows(logs["bad"]) == read_rows(logs["good"])
    # Up to the first bad step all is equal, then the losses part; nothing became NaN.
    losses, expected = record.series("loss"), good_record.series("loss")
    assert [losses[step] for step in (1, 2, 3)] == [expected[step] for step in (1, 2, 3)]
    assert losses[4] != expected[4]
    assert all(math.isfinite(value) for value in losses.values())
    # A checkpoint that was due at a step that was skipped waits for a good one.
    assert commits(tmp_path / "bad") == [6]
    assert commits(tmp_path / "good") == [6, 3]


def test_a_checkpoint_that_the_clock_asks_for_waits_for_a_good_step(make_job, one_rank, fail_at, tmp_path) -> None:
    fail_at("gradients@step=2:nan")
    job = make_job(faults=non_finite(skip=1), steps=4, checkpoint_interval_seconds=1e-6, checkpoint_async=False)
    train_recorded(one_rank, job)
    assert commits(tmp_path / "workspace")[:2] == [4, 2]


def test_a_smaller_micro_batch_divides_the_one_before(make_job, one_rank, tmp_path) -> None:
    plan, room = SimpleNamespace(rows_per_micro_batch=9), SimpleNamespace(state_bytes=0)
    session = SimpleNamespace(plan=plan, worker=one_rank, room=room)
    job = make_job(micro_batch_sequences=9, faults=FaultPolicy(out_of_memory="smaller_micro_batch"))
    with pytest.raises(ClusterError) as caught, _enough_memory(session, job):
        raise MemoryError
    assert "micro-batches of 3 rows" in caught.value.hint
    assert noted_rows(open_store(job.workspace), asked_rows=9) == 3


def test_too_many_skips_in_a_row_stop_training(make_job, one_rank, fail_at) -> None:
    fail_at("gradients@step=3:nan; gradients@step=4:nan; gradients@step=5:nan")
    with pytest.raises(StageError, match=r"step 6 of 6.*parameters are those of step 3"):
        train_recorded(one_rank, make_job(faults=non_finite(skip=2)))


def test_after_a_rollback_the_rows_since_the_commit_are_left_out(make_job, one_rank, fail_at, tmp_path: Path) -> None:
    log = tmp_path / "log"
    rows = functools.partial(WatchedRows, make_job().open_dataset, log_directory=log)
    fail_at("gradients@step=4:nan")
    job = make_job(open_dataset=rows, faults=non_finite(skip=0, then="rollback"))
    recorder = Recorder()
    with pytest.raises(StageError, match="going back to the last commit did not help") as caught:
        train(one_rank, job, reporter=recorder)
    assert "step 5 of 6: the gradient norm is nan" in caught.value.message
    assert "parameters are those of step 4 (" in caught.value.message
    assert any("back to step 3, and on with the rows after these" in note for note in recorder.notes)
    assert recorder.series("rollbacks") == {5: 1.0}
    assert sorted(read_rows(log)) == [0, 1, 2, 3, 4, 5, 6]

    # The place was left behind: the same training, run again, goes on from the commit and ends.
    fail_at("")
    result, _ = train_recorded(one_rank, job)
    assert result.state.step == 6
    assert result.resumed_from_step == 3


def test_rows_that_are_not_finite_are_left_out(spoiled_job, one_rank, tmp_path: Path) -> None:
    skipped, record = train_recorded(one_rank, spoiled_job(workspace=tmp_path / "skip", faults=non_finite(skip=1)))
    assert skipped.skipped_steps == 1
    assert math.isfinite(skipped.state.validation_loss)  # running statistics took nothing of these rows
    assert sorted(set(range(1, 9)) - set(record.series("loss"))) == [5]

    back, record = train_recorded(
        one_rank, spoiled_job(workspace=tmp_path / "back", faults=non_finite(skip=0, then="rollback"))
    )
    assert record.series("rollbacks") == {5: 1.0}
    assert math.isfinite(back.state.validation_loss)
    assert back.state.step == 8
    again, _ = train_recorded(
        one_rank, spoiled_job(workspace=tmp_path / "back", faults=non_finite(skip=0, then="rollback"))
    )
    assert again.state == back.state


def test_a_signal_leads_to_one_commit_at_the_next_boundary(make_job, one_rank, fail_at, tmp_path: Path) -> None:
    straight, expected = train_recorded(one_rank, make_job(workspace=tmp_path / "straight", steps=7))
    places = {"forward@step=3": 5, "save@step=3": 4, "step_done@step=4": 6, "validation": 0}
    for place, committed in places.items():
        job = make_job(workspace=tmp_path / place, steps=7)
        fail_at(f"{place}:terminate")
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(PreemptedError, match="asked: rank 0 by SIGTERM") as caught:
            train_recorded(one_rank, job)
        assert signal.getsignal(signal.SIGTERM) is before
        assert caught.value.exit_code == 75
        assert [step for step in commits(tmp_path / place) if step != 3] == ([committed] if committed else [])
        fail_at("")
        resumed, record = train_recorded(one_rank, job)
        assert resumed.resumed_from_step == committed
        assert resumed.state == straight.state
        assert record.series("loss") == {s: v for s, v in expected.series("loss").items() if s > committed}


def test_a_validation_that_was_cut_short_is_made_up_for(make_job, one_rank, monkeypatch, tmp_path: Path) -> None:
    job = make_job(steps=3, checkpoint_every_steps=5)
    straight, expected = train_recorded(one_rank, make_job(steps=3, workspace=tmp_path / "straight"))
    seen = []

    def interrupted(session):
        seen.append(session)
        if len(seen) == 2:  # the first is that of the initial weights
            ask(Flag.STOP, reason="a test")
        return validate(session)

    monkeypatch.setattr("pipeline.training.loop.validate", interrupted)
    with pytest.raises(
        Interrupted, match=r"after step 3 of 3; asked: rank 0 by a test; checkpoints/step-00000003/.* is commi"
    ):
        train_recorded(one_rank, job)
    resumed, record = train_recorded(one_rank, job)
    assert resumed.resumed_from_step == 3
    assert resumed.state == straight.state
    assert record.series("validation_loss") == {3: expected.series("validation_loss")[3]}


def test_a_checkpoint_can_be_asked_for(make_job, one_rank, tmp_path: Path) -> None:
    ask(Flag.SAVE, reason="a test")
    train_recorded(one_rank, make_job(steps=6, keep_checkpoints=5))
    assert commits(tmp_path / "workspace") == [6, 3, 1]


def test_words_may_be_rarer_than_steps(make_job, one_rank, fail_at, tmp_path: Path) -> None:
    fail_at("forward@step=1:terminate")
    with pytest.raises(PreemptedError):
        train_recorded(
            one_rank,
            make_job(steps=9, validate_every_steps=9, checkpoint_every_steps=9, faults=FaultPolicy(agree_every=4)),
        )
    assert commits(tmp_path / "workspace") == [5]  # words travel with steps 0, 4, 8


def test_too_little_memory_ends_training_or_makes_the_next_start_smaller(
    make_job, one_rank, fail_at, tmp_path: Path
) -> None:
    straight, expected = train_recorded(one_rank, make_job(workspace=tmp_path / "straight"))
    fail_at("forward@step=4@generation=1:oom")
    with pytest.raises(StageError) as stopped:
        train_recorded(one_rank, make_job(workspace=tmp_path / "stop"))
    for found in ("rank 0 of 1 is out of memory with micro-batches of 2 rows", "peak", "MiB of that"):
        assert found in stopped.value.message
    assert "smaller_micro_batch" in stopped.value.hint

    job = make_job(faults=FaultPolicy(out_of_memory="smaller_micro_batch"))
    with pytest.raises(ClusterError, match="out of memory") as smaller:
        train_recorded(one_rank, job)
    assert "the next start takes micro-batches of 1 rows" in smaller.value.hint
    result, record = train_recorded(one_rank, job)
    assert result.resumed_from_step == 3
    assert "in 8 passes" in record.progressed[0][1]
    notes = [open_store(str(tmp_path / name)) for name in ("straight", "stop", "workspace")]
    assert [rows_were_cut(store, asked_rows=2) for store in notes] == [False, False, True]
    assert result.state.validation_loss == pytest.approx(straight.state.validation_loss, rel=MICRO_BATCH_TOLERANCE)
    losses = record.series("loss")
    assert losses == pytest.approx({s: expected.series("loss")[s] for s in losses}, rel=MICRO_BATCH_TOLERANCE)

    fail_at("forward@step=5:oom")
    (tmp_path / "workspace" / result.commit.key.prefix / "COMMIT.json").unlink()
    with pytest.raises(StageError, match="micro-batches of 1 rows"):  # nothing smaller is left
        train_recorded(one_rank, job)


def test_batches_of_modules_that_depend_on_the_cut_do_not_shrink(spoiled_job, one_rank) -> None:
    with pytest.raises(ParameterError, match="may normalize by the rows of one pass"):
        train_recorded(one_rank, spoiled_job(faults=FaultPolicy(out_of_memory="smaller_micro_batch")))


def test_what_an_interruption_cost_is_reported_after_the_first_new_step(make_job, one_rank, fail_at) -> None:
    fail_at("forward@step=5:raise")
    job = make_job(steps=8)
    with pytest.raises(FailpointError):
        train_recorded(one_rank, job)
    fail_at("")
    _, record = train_recorded(one_rank, job)
    parts = {name: record.series(name) for name in ("rto_init_seconds", "rto_load_seconds", "rto_warmup_seconds")}
    assert all(set(found) == {6} and found[6] >= 0 for found in parts.values())
    assert record.series("rto_replay_seconds")[6] > 0
    assert record.series("rpo_steps") == {6: 2.0}
    assert record.series("rpo_seconds")[6] > 0
    assert record.series("rto_detect_seconds") == {}  # no executor said when it noticed
    _, again = train_recorded(one_rank, job)
    assert again.series("rpo_steps") == {}
