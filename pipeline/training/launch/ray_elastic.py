"""How many workers a start of an elastic gang has.

Owns the decision to start, to shrink and to grow. Knows of training only where its newest commit stands, and imports no
torch. The one decision: a gang shrinks only when it lost a worker anyway, and grows only right after a checkpoint was
committed, so that growing costs the steps of one poll and not those of an interval. A size that found room and could
not be started is left out until the gang runs: growing must not end a training that ran.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)

from pipeline.artifacts.store import open_store
from pipeline.cluster.ray_placement import group_name
from pipeline.errors import ClusterError, PipelineError
from pipeline.training.checkpoints.commit import find_resumable

SETTLE_SECONDS = 3.0
"""A smaller gang starts no earlier after a failure: a node that only paused is back by then."""
LOOK_SECONDS = 2.0
"""Between two looks for free resources while a gang runs with fewer workers than it may have."""
COMMIT_SECONDS = 1.0
"""Between two looks for a new commit once it could grow."""
_PAUSE_SECONDS = 0.2
_ROUNDING = 1e-6


class FixedSize(ScalingPolicy):
    """Always the same number of workers; the placement group waits for their resources.

    Ray Train's own also asks a coordinator of data sets for them, an actor that has to start first.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing: a waiting placement group is a demand that an autoscaler sees."""

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start all."""
        return _resize(self.scaling_config, self.scaling_config.max_workers)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Stay."""
        return NoopDecision()


class ElasticSize(ScalingPolicy):
    """As many workers as fit, of the sizes that divide the global batch."""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        *,
        sizes: tuple[int, ...],
        start_timeout_seconds: float,
        newest_step: Callable[[], int],
        last_step: int,
        resources: Callable[[], list[Mapping[str, float]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make the policy of one gang.

        Args:
            scaling_config: with the resources of a worker.
            sizes: allowed numbers of workers, ascending.
            start_timeout_seconds: without room for the smallest gang for so long, training ends.
            newest_step: step of the newest committed checkpoint; 0 where there is none.
            last_step: with which training ends; its commit is no reason to grow.
            resources: of each node that takes work, free or held by this gang; the cluster's where None. A failed
                gang holds its own until the next one is decided on.
            clock: seconds.
            sleep: of the controller's loop, which does not pause by itself while it has no workers.
        """
        super().__init__(scaling_config)
        self._sizes = sizes
        self._start_timeout_seconds = start_timeout_seconds
        self._newest_step = newest_step
        self._last_step = last_step
        labels = scaling_config.label_selector or {}
        self._resources = resources or (lambda: resources_for_gang(labels))
        self._clock = clock
        self._sleep = sleep
        self._wanted = sizes[-1]
        self._tried: int | None = None
        self._idle_since: float | None = None
        self._looked_at = clock()
        self._step_before: int | None = None

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing: the sizes come from what is free, not from a coordinator's reservation."""

    def _get_num_workers_for_resource_request(self) -> int:
        return self._sizes[-1]

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start with the size of before, or with a smaller one where that does not fit for a while.

        Raises:
            ClusterError: not even the smallest size fits, or none has come up, within the start timeout.
        """
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        waited = now - self._idle_since
        room = self._room()
        if self._tried is not None:  # it was asked for, and never ran
            room = min(room, max(self._tried - 1, self._sizes[0]))
        largest = self._largest(room)
        if waited > self._start_timeout_seconds:
            what = "no room for" if not largest else "room for, but no start of,"
            raise ClusterError(
                f"{what} {self._sizes[0]} workers of {self._needs()} within {self._start_timeout_seconds:g} s",
                hint="lower `resources.workers.min`, or bring nodes back",
            )
        if largest >= self._wanted or (largest and waited >= SETTLE_SECONDS):
            self._tried = largest
            return _resize(self.scaling_config, largest)
        self._sleep(_PAUSE_SECONDS)
        return NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Grow right after a commit where more workers fit."""
        now, size = self._clock(), int(worker_group_state.num_workers)
        self._idle_since = self._tried = None
        self._wanted = size
        pause = LOOK_SECONDS if self._step_before is None else COMMIT_SECONDS
        if size == self._sizes[-1] or now - self._looked_at < pause:
            return NoopDecision()
        self._looked_at = now
        largest = self._largest(self._room())
        if largest <= size:
            self._step_before = None
            return NoopDecision()
        try:
            newest = self._newest_step()
        except PipelineError:  # storage that is away is no reason to end a gang that runs; the next look asks again
            return NoopDecision()
        if newest >= self._last_step:
            return NoopDecision()
        if self._step_before is None or newest <= self._step_before:
            self._step_before = newest
            return NoopDecision()
        self._step_before = None
        self._tried = largest
        return _resize(self.scaling_config, largest)

    def _largest(self, room: int) -> int:
        """The largest size that fits; 0 where none does."""
        return max((size for size in self._sizes if size <= room), default=0)

    def _room(self) -> int:
        """Workers that fit into what is free or held by this gang."""
        each = {name: need for name, need in self.scaling_config._resources_per_worker_not_none.items() if need > 0}
        return sum(
            min(int((node.get(name, 0.0) + _ROUNDING) // need) for name, need in each.items())
            for node in self._resources()
        )

    def _needs(self) -> str:
        needs = self.scaling_config._resources_per_worker_not_none
        return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def make_policy(
    scaling_config: ScalingConfig,
    *,
    sizes: tuple[int, ...],
    start_timeout_seconds: float,
    workspace: str,
    last_step: int,
) -> ScalingPolicy:
    """`FixedSize` for one size, else `ElasticSize` on the checkpoints of a workspace."""
    if len(sizes) == 1:
        return FixedSize(scaling_config)
    return ElasticSize(
        scaling_config,
        sizes=sizes,
        start_timeout_seconds=start_timeout_seconds,
        newest_step=lambda: _newest_step(workspace),
        last_step=last_step,
    )


def _newest_step(workspace: str) -> int:
    commits = find_resumable(open_store(workspace)).commits
    return commits[0].key.step if commits else 0


def resources_for_gang(labels: Mapping[str, str]) -> list[Mapping[str, float]]:
    """What is free, or held by this actor's gang, on each node that is alive, does not drain and has the labels."""
    draining = cluster_state.get_draining_nodes()
    nodes = [node for node in cluster_state.node_table() if node["Alive"] and node["NodeID"] not in draining]
    found = {node["NodeID"]: Counter[str]() for node in nodes if labels.items() <= (node.get("Labels") or {}).items()}
    for node, free in cluster_state.available_resources_per_node().items():
        if node in found:
            found[node].update(free)
    name = group_name(ray.get_runtime_context().get_actor_name() or "")
    for group in cluster_state.placement_group_table().values():
        # After a node is lost the group is being rescheduled; its other bundles still hold what they held.
        if group["name"] == name and group["state"] != "REMOVED":
            for index, node in group["bundles_to_node_id"].items():
                if node in found:
                    found[node].update(group["bundles"][index])
    return list(found.values())


def _resize(scaling_config: ScalingConfig, num_workers: int) -> ResizeDecision:
    return ResizeDecision(num_workers=num_workers, resources_per_worker=scaling_config._resources_per_worker_not_none)
