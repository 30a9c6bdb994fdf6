"""The gang on Ray Train: live reports, restarts that resume, and errors with their own class."""

import functools
import signal
import time
from dataclasses import replace
from pathlib import Path

import gang_rows
import psutil
import pytest
import rank_functions
import ray
from gang_rows import OnceFaultyRows
from rank_functions import StoppingRows
from ray import cloudpickle
from ray._private.state import actors

from pipeline.errors import ClusterError, StageError
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.device import DeviceChoice
from pipeline.training.fault_policy import FaultPolicy
from pipeline.training.launch.ray_train import Gang, train_on_ray

pytestmark = pytest.mark.ray

HANG_SECONDS = 6.0
"""A rank waits so long for one that is stopped."""
SLOW_STEP_SECONDS = 0.5
"""Twice as long as it is between two looks of the controller, which let a worker take a signal."""
KILL_NOTICED_SECONDS = 6.0
"""The controller looks four times a second. Measured beside eight busy processes: 0.4 to 2 s."""
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
    for module in (rank_functions, gang_rows):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (rank_functions, gang_rows):
        cloudpickle.unregister_pickle_by_value(module)


def series(reports: list[Report], name: str) -> dict[int, float]:
    return {
        report.step: report.payload[name]
        for report in reports
        if report.kind == "metrics" and name in report.payload and report.step is not None
    }


def test_a_killed_and_a_hung_rank_cost_the_steps_since_the_last_commit(
    ray_cluster, make_job, token_rows: Path, tmp_path: Path
) -> None:
    faults = {4: signal.SIGKILL, 5: signal.SIGSTOP}
    rows = functools.partial(OnceFaultyRows, token_rows, faults=faults, rank=1, marks=tmp_path)
    policy = FaultPolicy(collective_timeout_seconds=HANG_SECONDS, step_timeout_seconds=60, start_timeout_seconds=120)
    reports: list[Report] = []
    end = train_on_ray(
        make_job(open_dataset=rows, faults=policy, checkpoint_async=False),
        gang=replace(GANG, max_worker_failures=2),
        make_reporter=BufferedReporter,
        deliver=reports.extend,
    )
    result = end.training
    assert end.world_sizes == (2, 2, 2)
    pids = [int((tmp_path / name).read_text()) for name in ("SIGKILL", "SIGSTOP")]
    assert result.resumed_from_step == 3
    assert result.state.step == 6
    assert set(series(reports, "loss")) == {1, 2, 3, 4, 5, 6}
    notes = [report.payload["text"] for report in reports if report.kind == "note"]
    assert "resumed from the checkpoint of step 3" in notes
    assert any(note.startswith("pre-flight: 2 ranks reach each other over ") for note in notes)
    assert result.commit.key.generation == 3
    killed, hung = recoveries(reports)
    assert killed["rto_detect_seconds"] < KILL_NOTICED_SECONDS
    assert hung["rto_detect_seconds"] > HANG_SECONDS
    assert (killed["rpo_steps"], hung["rpo_steps"]) == (1, 2)
    for parts in (killed, hung):
        assert parts["rto_teardown_seconds"] > 0
        assert parts["rto_schedule_seconds"] > 0
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert_nothing_is_left()


def test_a_signal_to_one_worker_makes_the_gang_commit_and_start_again(
    ray_cluster, make_job, token_rows: Path, tmp_path: Path
) -> None:
    rows = functools.partial(
        OnceFaultyRows, token_rows, faults={1: signal.SIGTERM}, rank=1, marks=tmp_path, seconds=SLOW_STEP_SECONDS
    )
    reports: list[Report] = []
    end = train_on_ray(
        make_job(open_dataset=rows, checkpoint_every_steps=6),
        gang=replace(GANG, max_worker_failures=0),  # making way uses none up
        make_reporter=BufferedReporter,
        deliver=reports.extend,
    )
    assert end.world_sizes == (2, 2)
    assert end.training.state.step == 6
    assert 2 <= end.training.resumed_from_step < 6
    assert_nothing_is_left()


def test_a_rank_that_raises_is_the_users_error_and_is_not_trained_again(
    ray_cluster, make_job, token_rows: Path, tmp_path: Path
) -> None:
    rows = functools.partial(StoppingRows, token_rows, stop_at=4, rank=1)
    with pytest.raises(StageError, match="rank 1: StoppedError: no rows for step 4") as caught:
        train_on_ray(make_job(open_dataset=rows), gang=GANG, make_reporter=BufferedReporter, deliver=lambda _: None)
    assert caught.value.exit_code == 1
    assert [path.name for path in (tmp_path / "workspace" / "generations").iterdir()] == ["0001"]


@pytest.mark.parametrize("too_much", [{"gpus_per_worker": 64.0}, {"memory_per_worker": 2**50}], ids=str)
def test_a_gang_that_cannot_be_placed_is_a_cluster_error(ray_cluster, make_job, too_much) -> None:
    gang = replace(GANG, sizes=(1,), max_worker_failures=0, start_timeout_seconds=2.0, **too_much)
    with pytest.raises(ClusterError, match="Ray Train could not run the workers"):
        train_on_ray(make_job(), gang=gang, make_reporter=BufferedReporter, deliver=lambda _: None)


def recoveries(reports: list[Report]) -> list[dict[str, float]]:
    """The parts of each recovery, in their order."""
    return [
        report.payload for report in reports if report.kind == "metrics" and "rto_schedule_seconds" in report.payload
    ]


def assert_nothing_is_left() -> None:
    """Every actor, placement group and process of training ends soon after the launch returned."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        alive = [item["ActorClassName"] for item in actors().values() if item["State"] == "ALIVE"]
        left = [name for name in alive if "Train" in name or name in ("Host", "SynchronizationActor")]
        left += [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        left += [name for process in psutil.process_iter() if "RayTrainWorker" in (name := process.name())]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
