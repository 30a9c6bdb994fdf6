"""What a resolved stage takes from the cluster.

Pure. The one decision: GPUs that a flow leaves open are given where the cluster has them, so that the same file runs
on a laptop and on a GPU cluster; what was given and why is recorded with the stage.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pipeline.cluster.capacity import Capacity, Demand, why_infeasible
from pipeline.cluster.isolation import ServingAsk, ServingPlan, why_not_shared
from pipeline.cluster.ledger import why_oversubscribed
from pipeline.errors import ClusterError, FailureClass, ParameterError
from pipeline.plan.stage import ResolvedStage
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import Resources
from pipeline.stages.registry import Location


def num_copies(stage: ResolvedStage) -> int:
    """Workers of a gang (of an elastic one the fewest), replicas of a deployment, else 1."""
    if stage.kind.gang:
        return stage.resources.min_workers or stage.resources.workers
    return int(getattr(stage.parameters, "replicas", 1))


def assign(stage: ResolvedStage, capacity: Capacity) -> tuple[Resources, str]:
    """The resources of each worker or replica of a stage on this cluster, and the reason for its GPUs."""
    device = getattr(stage.parameters, "device", "cpu")
    if stage.resources.gpus is not None:
        return stage.resources, f"gpus: {stage.resources.gpus:g} as the flow says"
    if device == "cpu" or not stage.kind.auto_gpus:
        return replace(stage.resources, gpus=0.0), "no GPU asked for"
    wanted = stage.kind.auto_gpus * num_copies(stage)
    if wanted <= capacity.gpus:
        return replace(stage.resources, gpus=stage.kind.auto_gpus), (
            f"gpus: {stage.kind.auto_gpus:g} each, for {capacity.source} has {capacity.gpus:g}"
        )
    return replace(stage.resources, gpus=0.0), f"no GPU: {wanted:g} wanted, {capacity.source} has {capacity.gpus:g}"


def demand_of(stage: ResolvedStage, capacity: Capacity) -> Demand:
    """All that a stage holds at once; nothing for a stage that runs on the driver."""
    if stage.kind.location is Location.DRIVER:
        return Demand(stage=stage.name, cpus=0.0, gpus=0.0, memory_bytes=0)
    resources, _ = assign(stage, capacity)
    num = num_copies(stage)
    return Demand(
        stage=stage.name,
        cpus=resources.cpus * num,
        gpus=(resources.gpus or 0.0) * num,
        memory_bytes=resources.memory_bytes * num,
    )


def serving_plan(stages: Iterable[ResolvedStage], capacity: Capacity) -> ServingPlan:
    """The deployments of a flow on this cluster; a later stage of the same name takes the earlier one's place."""
    asks = {}
    for stage in stages:
        given = stage.parameters
        if isinstance(given, DeployServeParameters):
            resources, _ = assign(stage, capacity)
            asks[given.name] = ServingAsk(
                name=given.name,
                share=resources.gpus or 0.0,
                replicas=given.replicas,
                isolation=given.isolation,
                why_alone=_why_alone(given),
            )
    return ServingPlan(asks=tuple(asks.values()), num_devices=int(capacity.gpus))


def why_impossible(stages: Sequence[ResolvedStage], capacity: Capacity) -> list[str]:
    """One line for each stage that can never run on this cluster, and for what its deployments cannot share."""
    serving = serving_plan(stages, capacity)
    lines = [*why_infeasible([demand_of(stage, capacity) for stage in stages], capacity), *why_not_shared(serving.asks)]
    # A deployment that asks for more than there is by itself has its line already.
    claims = [one.claim for one in serving.processes if one.share * one.replicas <= capacity.gpus]
    together = why_oversubscribed(claims, num_devices=serving.num_devices, source=capacity.source)
    return lines if together is None else [*lines, together]


def possible(stage: ResolvedStage, capacity: Capacity) -> ResolvedStage:
    """The stage, or the first of its fallbacks that this cluster can run where it cannot run the stage itself."""
    chain = [stage, *(hop.stage for hop in stage.fallback if hop.stage is not None and FailureClass.INFRA in hop.on)]
    return next((one for one in chain if not _without_device([one], capacity) and _fits(one, capacity)), stage)


def check_possible(stages: Sequence[ResolvedStage], capacity: Capacity) -> None:
    """Refuse what the connected cluster can never run.

    Raises:
        ParameterError: a device that no node has.
        ClusterError: more of a resource than there is.
    """
    check_devices(stages, capacity)
    lines = why_impossible(stages, capacity)
    if lines:
        raise ClusterError("\n".join(lines), hint="lower `resources` of the stage, or use a larger cluster")


def check_here(stage: ResolvedStage, capacity: Capacity) -> None:
    """Refuse a stage that cannot run on this cluster where one of its fallbacks can.

    Raises:
        ClusterError: names the fallback.
    """
    other = possible(stage, capacity)
    if other is stage:
        return
    lines = why_infeasible([demand_of(stage, capacity)], capacity)
    raise ClusterError("; ".join(lines) or f"stage {stage.name!r} asks for device: cuda; {capacity.source} has no GPU")


def _fits(stage: ResolvedStage, capacity: Capacity) -> bool:
    return not why_infeasible([demand_of(stage, capacity)], capacity)


def check_sharing(stages: Sequence[ResolvedStage], *, where: Callable[[str], str] = lambda _: "") -> None:
    """Refuse what no cluster can give deployments; all at once. `where` as in `check_devices`.

    Raises:
        ParameterError: a share is neither a part of a device nor whole devices, or `isolation: shared` cannot be had.
    """
    asks = serving_plan(stages, Capacity(cpus=0.0, gpus=0.0, memory_bytes=0, source="no cluster")).asks
    names = {
        stage.parameters.name: stage.name for stage in stages if isinstance(stage.parameters, DeployServeParameters)
    }
    lines = [
        f"{where(names[ask.name])}stage {names[ask.name]!r}: gpus: {ask.share:g} is neither a part of one device nor "
        "whole devices"
        for ask in asks
        if ask.share > 1 and ask.share != int(ask.share)
    ]
    lines += why_not_shared(asks)
    if lines:
        raise ParameterError("\n".join(lines), hint="use gpus: 0.25, 1 or 2, and isolation: process or auto")


def _why_alone(given: DeployServeParameters) -> str:
    has_mesh = max(given.mesh.tensor, given.mesh.data, given.mesh.hosts) > 1
    asked = {"a mesh": has_mesh, "autoscaling": given.autoscaling is not None}
    return " and ".join(words for words, is_asked in asked.items() if is_asked)


def check_devices(
    stages: Iterable[ResolvedStage], capacity: Capacity, *, where: Callable[[str], str] = lambda _: ""
) -> None:
    """Refuse a stage that insists on CUDA where the cluster has no GPU; all at once.

    Args:
        stages: of the flow.
        capacity: of the cluster.
        where: stage name to where its device is written, ending with a space.

    Raises:
        ParameterError: names every such stage.
    """
    lines = [
        f"{where(stage.name)}stage {stage.name!r} asks for device: cuda; {capacity.source} has no GPU"
        for stage in _without_device(stages, capacity)
    ]
    if lines:
        raise ParameterError(
            "\n".join(lines), hint="use device: auto, or run on a cluster with GPUs (--address, --cluster)"
        )


def _without_device(stages: Iterable[ResolvedStage], capacity: Capacity) -> list[ResolvedStage]:
    """Those that insist on CUDA where there is none."""
    return [stage for stage in stages if getattr(stage.parameters, "device", None) == "cuda" and capacity.gpus == 0]
