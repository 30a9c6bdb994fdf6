"""A process that computes a part of a model and serves nobody.

Owns its life: it joins, loads its part, compiles, and makes the leader's calls until there are no more. Knows nothing
of Ray, HTTP or text. The one decision: it is built by the very functions that build the leader's executor, from the
leader's settings, so both have the same executables.
"""

from pathlib import Path

import jax

from pipeline.models.decoders.model import Decoder
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.accelerator.multi_host import Follower, HostPlan
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.hosting.completion_engine import executor_on
from pipeline.serving.hosting.loading_plan import limits_of, plan_loading
from pipeline.serving.replica_settings import ReplicaSettings


def follow(plan: HostPlan) -> None:
    """Be one host of a replica; returns when the leader ends.

    Raises:
        ClusterError: the leader is gone.
        Exception: whatever keeps this host from loading or computing its part; the leader is told.
    """
    follower = Follower(plan)
    try:
        executor = _executor(follower.settings())
        follower.meet(executor)
        executor.warm_up()
        follower.follow(executor.run)
    except Exception as error:  # whatever it is, the leader must be told
        follower.failed(error)
        raise


def _executor(settings: ReplicaSettings) -> ModelExecutor:
    plan = plan_loading(settings)
    mesh = ServingMesh.groups(settings.mesh, device=plan.device)[0]
    assert plan.settings.slots is not None and plan.settings.context is not None
    limits = limits_of(plan.settings, slots=plan.settings.slots, context=plan.settings.context)
    with jax.default_device(mesh.own_device):
        module = plan.load(Path(settings.model_path), layout=mesh.layout(plan.description))
        assert isinstance(module, Decoder)
        return executor_on(mesh, module, limits=limits, dtype=plan.placement.compute_dtype)
