"""The other hosts of a replica, as Ray actors.

Owns where followers run. Loads no jax before a process's environment is settled. The one decision: the replica's actor
is the leader and makes the followers itself, one in each other bundle of its placement group, so they live and die with
it, and Ray Serve, which knows of one actor alone, replaces all of them by replacing that one.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.errors import ClusterError
from pipeline.serving.accelerator.replica_environment import NUM_HOSTS, settle

STRATEGY = "STRICT_SPREAD"
"""One bundle a machine."""
LEADER = "pipeline.serving.accelerator.multi_host:Leader"
PLAN = "pipeline.serving.accelerator.multi_host:HostPlan"
FOLLOW = "pipeline.serving.hosting.follower:follow"
"""By name: importing them loads jax."""


class FollowerHost:
    """The actor of one other host."""

    def __init__(self) -> None:
        settle()

    def follow(self, plan: Mapping[str, Any]) -> None:
        """Compute a part of the model until the leader ends."""
        _named(FOLLOW)(_named(PLAN)(**plan))


class LedHosts:
    """A leader and the actors of its followers."""

    def __init__(self, num_hosts: int) -> None:
        """Start the followers and meet them.

        Raises:
            ClusterError: this actor has no placement group of so many bundles, or a follower does not come.
        """
        group = get_current_placement_group()
        found = 0 if group is None else len(group.bundle_specs)
        if found != num_hosts:
            raise ClusterError(
                f"a model over {num_hosts} hosts needs a placement group of as many bundles; this actor's has {found}"
            )
        self.leader = _named(LEADER)(address=ray.util.get_node_ip_address(), num_hosts=num_hosts)
        self._actors = [self._started(group, rank) for rank in range(1, num_hosts)]
        self._following = [
            actor.follow.remote(self.leader.plan_of(rank)) for rank, actor in enumerate(self._actors, start=1)
        ]
        self.leader.meet()

    def _started(self, group: Any, rank: int) -> Any:
        bundle = group.bundle_specs[rank]
        return (
            ray.remote(FollowerHost)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
        )


def led_hosts() -> LedHosts | None:
    """The other hosts of this process, or None where there are none.

    Raises:
        ClusterError: they cannot be had.
    """
    num_hosts = int(os.environ.get(NUM_HOSTS, "1"))
    return None if num_hosts == 1 else LedHosts(num_hosts)


def spread_options(*, num_hosts: int, cpus: float, gpus: float) -> dict[str, Any]:
    """Of a Ray Serve deployment whose replicas have one bundle on each of so many machines."""
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    return {"placement_group_bundles": [bundle] * num_hosts, "placement_group_strategy": STRATEGY}


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
