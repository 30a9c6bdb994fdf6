"""The experiment of `pipeline verify-resume`, on a tiny model: it finds equality, and it finds what differs."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_functions import train_recorded

from pipeline.data.packed import PackedDataset
from pipeline.diagnostics.verify_resume import Experiment, default_kills, train_all, verify_resume
from pipeline.errors import ClusterError, ParameterError
from pipeline.training.checkpoints.state_difference import _distance, state_differences, state_distances
from pipeline.training.launch.spawn import free_port
from pipeline.training.tasks.watched_rows import WatchedRows, digests_of, read_rows
from pipeline.training.worker import WorkerContext

MEASURED_STATE_ERROR = 1e-5
"""Relative, of 7 steps of the tiny model on one rank after 3 on two. With passes of another size on one rank, second
moments are 8e-7 apart, first ones 3e-7, parameters 5e-8."""


class ShiftingRows:
    """Gives other rows once a training has come to its last step: a data position that is not restored."""

    def __init__(self, path: Path, *, mark: Path, last_step: int) -> None:
        self._rows, self._mark, self._last_step = PackedDataset.open(path, verify=False), mark, last_step
        self._is_shifted = mark.exists()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def train_rows(self, step: int, **options: Any) -> np.ndarray:
        if step == self._last_step:
            self._mark.touch()
        return self._rows.train_rows(step + self._is_shifted, **options)


class InProcess(Experiment):
    """The experiment with one rank, in this process; a kill is an exception."""

    def train(self, jobs: Any, *, world_size: int) -> Any:
        worker = WorkerContext(
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            device_reason="a test",
            store_address=f"127.0.0.1:{free_port()}",
            num_threads=1,
        )
        return train_all(worker, jobs)


@pytest.fixture
def experiment(make_job, tmp_path: Path, monkeypatch):
    job = make_job(steps=10, checkpoint_every_steps=3, validate_every_steps=10, checkpoint_async=False)

    def run(
        open_dataset: Any = job.open_dataset, *, is_own_process: bool = True, loses: bool = False, **options: Any
    ) -> Any:
        def die(process: int, number: int) -> None:
            if loses:
                shutil.rmtree(tmp_path / "work/kill-4/workspace/checkpoints")
            raise ClusterError("a rank died")

        given = {"kills": (4,), "world_size": 1, "other_world_size": None} | options
        made = (InProcess if is_own_process else Experiment)(
            config=job.config, open_dataset=open_dataset, project_root=".", work=tmp_path / "work"
        )
        if is_own_process:
            monkeypatch.setattr("pipeline.training.tasks.watched_rows.os.kill", die)
        return verify_resume(made, **given)

    return run


@pytest.mark.slow
def test_a_killed_training_is_bit_equal_and_other_ranks_go_on(experiment) -> None:
    report = experiment(is_own_process=False, kills=(4,), world_size=2, other_world_size=1)
    assert [(case.killed_at, case.resumed_from, case.world_size) for case in report.cases] == [(4, 3, 2), (4, 3, 1)]
    assert [case.problems for case in report.cases] == [(), ()]
    assert report.ok
    assert report.to_json()["ok"]
    assert (report.cases[0].loss_error, report.cases[0].state_error) == (0.0, 0.0)
    assert 0.0 < report.cases[1].state_error < MEASURED_STATE_ERROR
    assert not report.draws


def test_every_step_may_be_the_last_one(experiment) -> None:
    report = experiment(kills=tuple(range(10)))
    assert [case.resumed_from for case in report.cases] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert [case.problems for case in report.cases] == [()] * 10


def test_a_data_position_that_is_lost_is_found(experiment, token_rows: Path, tmp_path: Path) -> None:
    report = experiment(functools.partial(ShiftingRows, token_rows, mark=tmp_path / "mark", last_step=9))
    (case,) = report.cases
    assert not report.ok
    told = "\n".join(case.problems)
    assert "losses: differ" in told
    assert "rows: other ones at step 0, 1, 2" in told
    assert "model: " in told
    assert "optimizer: " in told


def test_a_training_that_resumed_nothing_is_not_called_equal(experiment) -> None:
    (case,) = experiment(loses=True).cases
    assert case.problems == ("resumed from step 0, and the newest checkpoint was due at step 3",)


def test_kills_are_steps_of_the_run(experiment) -> None:
    assert default_kills(10) == (2, 5, 7)
    assert default_kills(2) == (1,)
    with pytest.raises(ParameterError, match="cannot kill at step 10, 12: the run has steps 0 to 9"):
        experiment(kills=(3, 10, 12))
    with pytest.raises(ParameterError, match="killing at step 1, 2 comes before the first checkpoint, at step 3"):
        experiment(kills=(2, 1, 2))
    with pytest.raises(ParameterError, match=r"going on with 1 rank\(s\) is what killed trainings do anyway"):
        experiment(other_world_size=1)


def test_a_difference_in_any_kind_of_state_is_named(make_job, one_rank, tmp_path: Path) -> None:
    runs = {name: train_recorded(one_rank, make_job(workspace=tmp_path / name))[0] for name in ("one", "two")}
    other = {"other_workspace": str(tmp_path / "two"), "other": runs["two"].commit}
    assert state_differences(str(tmp_path / "one"), runs["one"].commit, **other) == []
    rng = tmp_path / "two" / runs["two"].commit.key.prefix / "rank-00000.pt"
    state = torch.load(rng, weights_only=True)
    state["cpu"][0] += 1
    torch.save(state, rng)
    assert state_differences(str(tmp_path / "one"), runs["one"].commit, **other) == [
        "rng: 1 of 7 differ (rank-00000.cpu)"
    ]
    again, _ = train_recorded(one_rank, make_job(workspace=tmp_path / "three", seed=1))
    told = state_differences(
        str(tmp_path / "one"), runs["one"].commit, other_workspace=str(tmp_path / "three"), other=again.commit
    )
    distances = state_distances(
        str(tmp_path / "one"), runs["one"].commit, other_workspace=str(tmp_path / "three"), other=again.commit
    )
    assert set(distances) >= {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"}
    assert distances["optimizer.step"] == 0.0
    assert distances["optimizer.exp_avg"] > 0.1
    assert _distance({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)}) == math.inf
    assert 0.1 < distances["model"] < 1.0  # other matrices; norms begin as ones
    assert state_distances(str(tmp_path / "one"), runs["one"].commit, **other)["model"] == 0.0
    assert [line.split(":")[0] for line in told] == ["model", "optimizer", "rng"]


def test_rows_are_logged_by_rank_and_the_last_ones_count(token_rows: Path, tmp_path: Path) -> None:
    watched = WatchedRows(functools.partial(PackedDataset.open, token_rows), log_directory=tmp_path)
    asked = {"rows_per_step": 4, "world_size": 2, "seed": 0}
    given = [watched.train_rows(step, rank=rank, **asked) for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 0))]
    assert read_rows(tmp_path) == {
        0: [digests_of(given[0]), digests_of(given[1])],
        1: [digests_of(given[4]), digests_of(given[3])],
    }
    assert len(set(digests_of(given[0]) + digests_of(given[1]))) == 4
    arrays = {"b": np.arange(6).reshape(3, 2), "a": np.ones(3)}
    assert digests_of(arrays) == digests_of(dict(reversed(arrays.items())))
    assert len(set(digests_of(arrays))) == 3
