"""Whether an application's processes find room on the GPUs beside what serves already.

Owns the question to the cluster; the arithmetic is the ledger's. The one decision: it is asked before Ray Serve is,
because Ray would wait for room that may never come, and say nothing.
"""

from collections.abc import Mapping

import ray

from pipeline.cluster.ledger import Claim, why_oversubscribed
from pipeline.errors import ParameterError
from pipeline.serving.replica_settings import ProcessSettings


def check_room(
    application: str, process: ProcessSettings, *, serving: Mapping[str, Claim], is_replaced: bool = False
) -> None:
    """Refuse processes that the cluster's GPUs have no room for.

    Args:
        application: that asks.
        process: of its actors.
        serving: what serves now, by application.
        is_replaced: the application serves, and goes on until its new processes are ready: it needs room for both.

    Raises:
        ParameterError: with every share that is taken.
    """
    if process.gpus <= 0:
        return
    running = [
        Claim(owner=f"{claim.owner} (until it is replaced)", share=claim.share, processes=claim.processes)
        if name == application
        else claim
        for name, claim in serving.items()
        if claim.processes and (is_replaced or name != application)
    ]
    asked = Claim(owner=application, share=process.gpus, processes=process.replicas)
    num_devices = int(ray.cluster_resources().get("GPU", 0))
    reason = why_oversubscribed([asked], num_devices=num_devices, source="the cluster", running=running)
    if reason is not None:
        raise ParameterError(
            reason,
            hint="take a deployment down, ask for a smaller share (resources: gpus), or serve several models in one "
            "process (isolation: shared)"
            + ("; a version of the same shapes is swapped in without a second process" if is_replaced else ""),
        )
