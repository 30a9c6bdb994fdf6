"""An elastic gang on a cluster of its own, whose nodes come, drain and die."""

import functools
from pathlib import Path

import pytest
from conftest import SEQUENCE_LENGTH
from gang_rows import SlowRows
from node_gang import train_through_lost_nodes

from pipeline.training.device import DeviceChoice
from pipeline.training.fault_policy import FaultPolicy
from pipeline.training.launch.ray_train import Gang

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 600
"""More than a gang takes before the last node is gone; the rest is hurried through."""
STEP_SECONDS = 0.15
EVERY = 10


def test_a_gang_makes_way_grows_after_a_commit_and_survives_a_lost_node(
    make_job, token_rows: Path, tmp_path: Path, in_a_process
) -> None:
    hurry = tmp_path / "hurry"
    policy = FaultPolicy(collective_timeout_seconds=8, step_timeout_seconds=60, start_timeout_seconds=120)
    job = make_job(
        open_dataset=functools.partial(SlowRows, token_rows, seconds=STEP_SECONDS, hurry=hurry),
        steps=STEPS,
        checkpoint_every_steps=EVERY,
        validate_every_steps=STEPS,
        faults=policy,
    )
    gang = Gang(
        sizes=(1, 2),
        cpus_per_worker=1.0,
        gpus_per_worker=0.0,
        device=DeviceChoice(device="cpu", reason="a test"),
        max_worker_failures=1,  # for the node that dies; making way and growing use none up
        num_threads=1,
    )
    end, reports = in_a_process(train_through_lost_nodes, job, gang, first_commit=EVERY, hurry=hurry)
    assert end.world_sizes == (2, 1, 2, 1)
    assert end.training.state.step == STEPS
    assert end.training.state.units == STEPS * 8 * SEQUENCE_LENGTH
    losses = [
        report
        for report in reports
        if report.kind == "metrics" and "loss" in report.payload and report.step is not None
    ]
    assert {report.step for report in losses} == set(range(1, STEPS + 1))
    lost = [
        report.payload["rpo_steps"] for report in reports if report.kind == "metrics" and "rpo_steps" in report.payload
    ]
    # The first start after the drain lost nothing; growing lost the steps of a poll; the dead node at most an interval.
    assert lost[0] == 0
    assert max(lost) <= EVERY + 1
