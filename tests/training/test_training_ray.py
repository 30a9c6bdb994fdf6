"""The gang on Ray Train: live reports, restarts that resume, and errors with their own class."""

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest
import rank_functions
from rank_functions import OnceStoppingRows, StoppingRows
from ray import cloudpickle
from ray._private.state import actors

from pipeline.errors import ClusterError, StageError
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.device import DeviceChoice
from pipeline.training.launch.ray_train import Gang, train_on_ray

pytestmark = pytest.mark.ray

LEFTOVER_SECONDS = 20.0
"""Ray ends an actor some time after its last handle is gone."""
GANG = Gang(
    sizes=(2,),
    cpus_per_worker=0.5,
    gpus_per_worker=0.0,
    device=DeviceChoice(device="cpu", reason="a test"),
    max_worker_failures=1,
    num_threads=1,
)


@pytest.fixture(autouse=True, scope="module")
def rows_travel_by_value():
    """Workers of the cluster cannot import the tests' own modules."""
    cloudpickle.register_pickle_by_value(rank_functions)
    yield
    cloudpickle.unregister_pickle_by_value(rank_functions)


def series(reports: list[Report], name: str) -> dict[int, float]:
    return {
        report.step: report.payload[name]
        for report in reports
        if report.kind == "metrics" and name in report.payload and report.step is not None
    }


def test_a_killed_rank_costs_the_steps_since_the_last_commit(ray_cluster, make_job, token_rows: Path, tmp_path: Path):
    rows = functools.partial(OnceStoppingRows, token_rows, stop_at=4, rank=1, how="kill", mark=tmp_path / "killed")
    reports: list[Report] = []
    end = train_on_ray(make_job(open_dataset=rows), gang=GANG, make_reporter=BufferedReporter, deliver=reports.extend)
    result = end.training
    assert end.world_sizes == (2, 2)
    assert (tmp_path / "killed").exists()
    assert result.resumed_from_step == 3
    assert result.state.step == 6
    assert result.state.world_size == 2
    assert set(series(reports, "loss")) == {1, 2, 3, 4, 5, 6}
    notes = [report.payload["text"] for report in reports if report.kind == "note"]
    assert "resumed from the checkpoint of step 3" in notes
    assert result.commit.key.generation == 2
    assert_nothing_is_left()


def test_a_rank_that_raises_is_the_users_error_and_is_not_trained_again(
    ray_cluster, make_job, token_rows: Path, tmp_path: Path
) -> None:
    rows = functools.partial(StoppingRows, token_rows, stop_at=4, rank=1)
    with pytest.raises(StageError, match="rank 1: StoppedError: no rows for step 4") as caught:
        train_on_ray(make_job(open_dataset=rows), gang=GANG, make_reporter=BufferedReporter, deliver=lambda _: None)
    assert caught.value.exit_code == 1
    assert [path.name for path in (tmp_path / "workspace" / "generations").iterdir()] == ["0001"]


def test_a_gang_that_cannot_be_placed_is_a_cluster_error(ray_cluster, make_job) -> None:
    gang = replace(GANG, sizes=(1,), gpus_per_worker=64.0, max_worker_failures=0, start_timeout_seconds=2.0)
    with pytest.raises(ClusterError, match="Ray Train could not run the workers"):
        train_on_ray(make_job(), gang=gang, make_reporter=BufferedReporter, deliver=lambda _: None)


def assert_nothing_is_left() -> None:
    """Every actor of training ends soon after the launch returned."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        alive = [item["ActorClassName"] for item in actors().values() if item["State"] == "ALIVE"]
        alive = [name for name in alive if "Train" in name or name == "PlacementGroupCleaner"]
        if not alive:
            return
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)
