"""An elastic gang on a cluster of its own, whose nodes come, drain and die."""

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gang_rows
import pytest
import ray
from conftest import SEQUENCE_LENGTH
from gang_rows import SlowRows
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from pipeline.artifacts.store import open_store
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.device import DeviceChoice
from pipeline.training.fault_policy import FaultPolicy
from pipeline.training.launch.ray_train import Gang, train_on_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 600
"""More than a gang takes before the last node is gone; the rest is hurried through."""
STEP_SECONDS = 0.15
EVERY = 10
WAIT_SECONDS = 120.0
ONE_CPU = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
DEAD_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 8,
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={**ONE_CPU, "_system_config": DEAD_SOON})
    ray.init(address=made.address, namespace="pipeline", log_to_driver=False, configure_logging=False)
    cloudpickle.register_pickle_by_value(gang_rows)
    yield made
    cloudpickle.unregister_pickle_by_value(gang_rows)
    ray.shutdown()
    made.shutdown()


def wait_for(holds: Callable[[], bool], training) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert not training.done(), training.result()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def drain(cluster: Cluster, node) -> None:
    client = ray._raylet.GcsClient(address=cluster.address)
    in_a_minute = int((time.time() + 60) * 1000)
    accepted, why = client.drain_node(
        node.node_id, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "a test", in_a_minute
    )
    assert accepted, why


def test_a_gang_makes_way_grows_after_a_commit_and_survives_a_lost_node(
    cluster: Cluster, make_job, token_rows: Path, tmp_path: Path
) -> None:
    second = cluster.add_node(**ONE_CPU)
    cluster.wait_for_nodes()
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
    store = open_store(job.workspace)
    reports: list[Report] = []

    def newest() -> int:
        commits = find_resumable(store).commits
        return commits[0].key.step if commits else 0

    def starts() -> list[int]:
        return [int(name.rpartition("-")[2]) for name in store.list("worlds")]

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_on_ray, job, gang=gang, make_reporter=BufferedReporter, deliver=reports.extend)
        wait_for(lambda: newest() >= EVERY, training)
        drain(cluster, second)
        wait_for(lambda: starts() == [2, 1], training)
        cluster.remove_node(second)
        third = cluster.add_node(**ONE_CPU)
        wait_for(lambda: starts() == [2, 1, 2], training)
        step = newest()
        wait_for(lambda: newest() > step, training)
        cluster.remove_node(third, allow_graceful=False)
        hurry.touch()
        end = training.result(timeout=WAIT_SECONDS)
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
