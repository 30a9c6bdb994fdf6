"""When an elastic gang starts, shrinks and grows, by a clock and a cluster of the test's own."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.exceptions import WorkerGroupError

from pipeline.errors import ClusterError, ParameterError, StoreError
from pipeline.training.config import TrainConfig
from pipeline.training.launch import ray_gang
from pipeline.training.launch.ray_elastic import SETTLE_SECONDS, ElasticSize
from pipeline.training.launch.sizes import choose_sizes


@dataclass
class World:
    """A clock that only sleeping moves, CPUs of nodes, free or held by the gang, and the newest commit."""

    now: float = 0.0
    free: list[float] = field(default_factory=lambda: [2.0, 2.0])
    newest_step: int = 0
    is_storage_away: bool = False

    def newest(self) -> int:
        if self.is_storage_away:
            raise StoreError("the store does not answer")
        return self.newest_step

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def policy(self, sizes=(1, 2, 4), start_timeout_seconds=30.0, memory=0.0) -> ElasticSize:
        asked = {"memory": memory} if memory else {}
        return ElasticSize(
            ScalingConfig(num_workers=(sizes[0], sizes[-1]), resources_per_worker={"CPU": 1.0} | asked),
            sizes=sizes,
            start_timeout_seconds=start_timeout_seconds,
            newest_step=self.newest,
            last_step=100,
            resources=lambda: [{"CPU": cpus, "memory": 1.0} for cpus in self.free],
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@dataclass
class Running:
    """What the controller says of workers that run."""

    num_workers: int


def started(policy: ElasticSize) -> int:
    """Ask until the policy starts a gang; its size."""
    while isinstance(decision := policy.make_decision_for_non_running_worker_group(), NoopDecision):
        pass
    return decision.num_workers


def seen_while_running(policy: ElasticSize, world: World, size: int, *, seconds: float) -> list[int]:
    """Sizes that the policy asks for in so many seconds."""
    asked, until = [], world.now + seconds
    while world.now < until:
        decision = policy.make_decision_for_running_worker_group(Running(num_workers=size), None)
        if isinstance(decision, ResizeDecision):
            asked.append(decision.num_workers)
        world.now += 0.5
    return asked


def test_the_largest_size_that_fits_starts_and_fragments_do_not_count():
    assert started(World().policy()) == 4
    world = World(free=[1.5, 1.5, 0.5])
    assert started(world.policy()) == 2
    assert world.now >= SETTLE_SECONDS  # a larger gang had its chance
    assert started(World(free=[3.0]).policy()) == 2  # 3 is no size


def test_a_gang_that_lost_a_process_starts_with_its_old_size_and_one_that_lost_a_node_with_less():
    world = World()
    policy = world.policy()
    assert started(policy) == 4
    assert seen_while_running(policy, world, 4, seconds=10) == []
    before = world.now
    assert started(policy) == 4
    assert world.now == before
    seen_while_running(policy, world, 4, seconds=1)
    before, world.free = world.now, [2.0]
    assert started(policy) == 2
    assert world.now - before >= SETTLE_SECONDS


def test_it_grows_right_after_a_commit_and_never_between_two():
    world = World(free=[2.0])
    policy = world.policy()
    assert started(policy) == 2
    world.newest_step = 10
    assert seen_while_running(policy, world, 2, seconds=10) == []
    world.free = [2.0, 2.0]
    assert seen_while_running(policy, world, 2, seconds=10) == []
    world.newest_step = 20
    assert seen_while_running(policy, world, 2, seconds=2)[:1] == [4]


def test_room_that_cannot_be_started_on_does_not_end_a_training_that_ran():
    world = World(free=[2.0])
    policy = world.policy()
    assert started(policy) == 2
    world.free = [2.0, 2.0]
    asked = []
    while not asked:
        world.newest_step += 1
        asked = seen_while_running(policy, world, 2, seconds=0.5)
    assert asked == [4]
    world.now += 10
    assert started(policy) == 2
    world.now += 10
    assert started(policy) == 1
    seen_while_running(policy, world, 1, seconds=1)
    assert started(policy) == 4  # it runs, so what failed before may be tried again


def test_storage_that_is_away_does_not_end_a_gang_that_runs():
    world = World(free=[2.0])
    policy = world.policy()
    assert started(policy) == 2
    world.free, world.is_storage_away = [2.0, 2.0], True
    assert seen_while_running(policy, world, 2, seconds=10) == []
    world.is_storage_away = False
    assert seen_while_running(policy, world, 2, seconds=4) == []
    world.newest_step = 10
    assert seen_while_running(policy, world, 2, seconds=2)[:1] == [4]


def test_the_last_commit_is_no_reason_to_grow():
    world = World(free=[2.0])
    policy = world.policy()
    assert started(policy) == 2
    world.free, world.newest_step = [2.0, 2.0], 90
    assert seen_while_running(policy, world, 2, seconds=10) == []
    world.newest_step = 100
    assert seen_while_running(policy, world, 2, seconds=10) == []


def test_one_more_worker_is_no_reason_to_grow_where_it_is_no_size():
    world = World(free=[2.0])
    policy = world.policy()
    assert started(policy) == 2
    world.free, world.newest_step = [3.0], 10
    seen_while_running(policy, world, 2, seconds=4)
    world.newest_step = 20
    assert seen_while_running(policy, world, 2, seconds=4) == []


def test_a_cluster_without_room_for_the_fewest_ends_at_the_deadline():
    world = World(free=[1.0])
    policy = world.policy(sizes=(2, 4), start_timeout_seconds=20.0)
    with pytest.raises(ClusterError, match="no room for 2 workers of 1 CPU within 20 s"):
        started(policy)
    assert 20 <= world.now <= 21


def test_starts_that_fail_again_and_again_end_at_the_deadline_too():
    world = World()
    policy = world.policy(start_timeout_seconds=20.0)
    sizes = []
    with pytest.raises(ClusterError, match="room for, but no start of, 1 workers of 1 CPU within 20 s"):
        while True:
            sizes.append(started(policy))
            world.now += 7
    assert sizes == [4, 2, 1]
    assert world.now < 30
    seen_while_running(policy, world, 4, seconds=1)
    assert started(policy) == 4  # once it runs, the time counts anew


class Workers:
    """One worker on one node."""

    def get_workers(self):
        return [SimpleNamespace(metadata=SimpleNamespace(node_id="n", node_ip="10.0.0.7"))]

    def execute_async(self, call, function, reason):
        self.asked = reason


def test_a_node_that_goes_before_its_rank_has_saved_uses_up_no_restart(monkeypatch: pytest.MonkeyPatch):
    draining: dict[str, int] = {}
    monkeypatch.setattr(ray_gang.cluster_state, "get_draining_nodes", lambda: draining)
    drains, workers = ray_gang.Drains(b""), Workers()
    restarts = ray_gang.Restarts(FailureConfig(max_failures=1), drains=drains)
    died = WorkerGroupError("a rank died", worker_failures={0: RayActorError()})
    drains.after_worker_group_start(workers)
    draining["n"] = 0
    drains.after_worker_group_poll_status(None)
    assert workers.asked == "node 10.0.0.7 is drained"
    assert restarts.make_decision(died) is FailureDecision.RETRY
    draining.clear()
    drains.after_worker_group_start(workers)
    # The one restart is still there, and then it is used up.
    assert [restarts.make_decision(died) for _ in range(2)] == [FailureDecision.RETRY, FailureDecision.RAISE]


def test_a_worker_needs_a_node_with_its_memory():
    world = World(free=[2.0, 2.0])
    assert started(world.policy(memory=0.5)) == 4
    assert started(world.policy(memory=1.0)) == 2


def config(**fields) -> TrainConfig:
    given = {"model": "m:f", "steps": 2, "micro_batch_sequences": 2, "learning_rate": 1e-3}
    return TrainConfig(**(given | fields))


def test_numbers_of_workers_that_do_not_divide_the_batch_are_left_out_with_the_reason():
    sizes = choose_sizes(
        config(global_batch_examples=8), sequence_length=None, shape=None, min_workers=1, max_workers=4
    )
    assert sizes.allowed == (1, 2, 4)
    ((left_out, reason),) = sizes.left_out
    assert left_out == 3
    assert "global_batch_examples 8 is no multiple of 3 workers" in reason
    assert str(sizes).startswith("1, 2, 4 workers; not 3: global_batch_examples")


def test_a_range_without_any_number_is_refused_for_the_reason_of_the_largest():
    with pytest.raises(ParameterError, match="no multiple of 7 workers"):
        choose_sizes(config(global_batch_examples=8), sequence_length=None, shape=None, min_workers=5, max_workers=7)
    fixed = choose_sizes(
        config(global_batch_examples=8), sequence_length=None, shape=None, min_workers=None, max_workers=2
    )
    assert fixed.allowed == (2,)
