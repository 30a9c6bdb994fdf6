"""A gang on a cluster whose nodes come, drain and die: a program for a process of its own.

Ray starts a node by forking. In a process whose threads call gRPC, as those of a served test before do, the fork can
end as a node that never comes up.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gang_rows
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from pipeline.artifacts.store import open_store
from pipeline.stages.protocol import Report
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.launch.ray_train import Gang, GangResult, train_on_ray
from pipeline.training.session import TrainJob

WAIT_SECONDS = 120.0
ONE_CPU = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
DEAD_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 8,
}


@contextmanager
def cluster_of_one() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={**ONE_CPU, "_system_config": DEAD_SOON})
    ray.init(address=made.address, namespace="pipeline", log_to_driver=False, configure_logging=False)
    cloudpickle.register_pickle_by_value(gang_rows)
    yield made
    cloudpickle.unregister_pickle_by_value(gang_rows)
    ray.shutdown()
    made.shutdown()


def wait_for(holds: Callable[[], bool], training: Future[Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert not training.done(), training.result()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def drain(cluster: Cluster, node: Any) -> None:
    client = ray._raylet.GcsClient(address=cluster.address)
    in_a_minute = int((time.time() + 60) * 1000)
    accepted, why = client.drain_node(
        node.node_id, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "a test", in_a_minute
    )
    assert accepted, why


def train_through_lost_nodes(
    job: TrainJob, gang: Gang, *, first_commit: int, hurry: Path
) -> tuple[GangResult, list[Report]]:
    """Lose a node that drains, get another one, lose it without a word; how the training ended, and its reports."""
    store = open_store(job.workspace)
    reports: list[Report] = []

    def newest() -> int:
        commits = find_resumable(store).commits
        return commits[0].key.step if commits else 0

    def starts() -> list[int]:
        return [int(name.rpartition("-")[2]) for name in store.list("worlds")]

    with cluster_of_one() as cluster:
        second = cluster.add_node(**ONE_CPU)
        cluster.wait_for_nodes()
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train_on_ray, job, gang=gang, make_reporter=BufferedReporter, deliver=reports.extend)
            wait_for(lambda: newest() >= first_commit, training)
            drain(cluster, second)
            wait_for(lambda: starts() == [2, 1], training)
            cluster.remove_node(second)
            third = cluster.add_node(**ONE_CPU)
            wait_for(lambda: starts() == [2, 1, 2], training)
            step = newest()
            wait_for(lambda: newest() > step, training)
            cluster.remove_node(third, allow_graceful=False)
            hurry.touch()
            return training.result(timeout=WAIT_SECONDS), reports
