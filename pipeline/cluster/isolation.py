"""Which deployments share a process, and why.

Owns that decision and its words. Pure. The one decision: on a machine with one GPU, deployments of a flow that leave it
open share one process. They then have one context, one allocator and one reserve, and their batches follow each other
on one stream, where processes of their own would take turns and gain nothing (0.96 of the throughput of one process
with two, measured elsewhere without the multi-process service).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pipeline.cluster.ledger import Claim

Isolation = Literal["auto", "shared", "process"]
SHARED_GPU = "shared-gpu"
"""Application of the process that deployments on a GPU share."""
SHARED_CPU = "shared-cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingAsk:
    """One deployment of a flow, as far as sharing goes."""

    name: str
    share: float
    """Of a device; 0 on a CPU."""
    replicas: int = 1
    isolation: Isolation = "auto"
    why_alone: str = ""
    """What it asks for that a shared process cannot give (a mesh, autoscaling); empty where there is nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """All deployments of a flow, and the GPUs of its cluster; each deploying stage is told."""

    asks: tuple[ServingAsk, ...]
    num_devices: int

    def to_text(self) -> str:
        """JSON, for the environment of a stage."""
        return json.dumps({"asks": [asdict(ask) for ask in self.asks], "num_devices": self.num_devices})

    @classmethod
    def from_text(cls, text: str) -> "ServingPlan":
        """Back from `to_text`."""
        given = json.loads(text)
        return cls(asks=tuple(ServingAsk(**ask) for ask in given["asks"]), num_devices=given["num_devices"])

    @property
    def processes(self) -> "tuple[ServingProcess, ...]":
        """Of all deployments."""
        return serving_processes(self.asks, num_devices=self.num_devices)

    def process_of(self, name: str) -> "ServingProcess":
        """The process in which the deployment `name` is served."""
        return next(one for one in self.processes if name in one.deployments)

    def part_of(self, name: str) -> float:
        """The deployment's part of its process's memory: its share over the shares of all that are in it."""
        shares = {ask.name: ask.share for ask in self.asks if ask.name in self.process_of(name).deployments}
        return shares[name] / total if (total := sum(shares.values())) else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingProcess:
    """One application: a process for each of its replicas."""

    application: str
    deployments: tuple[str, ...]
    share: float
    replicas: int
    is_shared: bool
    reason: str

    @property
    def claim(self) -> Claim:
        """What the ledger sees of it."""
        return Claim(owner=self.application, share=self.share, processes=self.replicas)


def serving_processes(asks: Sequence[ServingAsk], *, num_devices: int) -> tuple[ServingProcess, ...]:
    """The processes of these deployments, in the order of the first of each.

    A shared process gets the sum of its deployments' shares, at most one device: it has one pool of memory, which is
    judged against all of them together where it loads.

    Args:
        asks: the deployments of one flow; names are unique.
        num_devices: GPUs of the cluster.
    """
    reasons = {ask.name: _reason(ask, asks, num_devices=num_devices) for ask in asks}
    made: dict[str, ServingProcess] = {}
    for ask in asks:
        is_shared, reason = reasons[ask.name]
        application = _application(ask) if is_shared else ask.name
        if application in made:
            continue
        members = [ask]
        if is_shared:
            members = [one for one in asks if reasons[one.name][0] and _application(one) == application]
        made[application] = ServingProcess(
            application=application,
            deployments=tuple(one.name for one in members),
            share=min(1.0, round(sum(one.share for one in members), 4)) if is_shared else ask.share,
            replicas=max(one.replicas for one in members),
            is_shared=is_shared,
            reason=reason,
        )
    return tuple(made.values())


def why_not_shared(asks: Sequence[ServingAsk]) -> list[str]:
    """One line for each deployment that asks to be shared and cannot be."""
    lines = [
        f"deployment {ask.name!r}: isolation: shared does not go with {ask.why_alone}; use isolation: process"
        for ask in asks
        if ask.isolation == "shared" and ask.why_alone
    ]
    lines += [
        f"deployment {ask.name!r}: isolation: shared does not go with gpus: {ask.share:g}; a shared process has one "
        "device"
        for ask in asks
        if ask.isolation == "shared" and ask.share > 1
    ]
    for application in (SHARED_GPU, SHARED_CPU):
        members = [ask for ask in asks if ask.isolation == "shared" and _application(ask) == application]
        if len({ask.replicas for ask in members}) > 1:
            counts = ", ".join(f"{ask.name!r} {ask.replicas}" for ask in members)
            lines.append(
                f"deployments of one shared process must have the same number of replicas, but these ask for {counts}; "
                "use isolation: process for those that differ"
            )
    return lines


def _application(ask: ServingAsk) -> str:
    return SHARED_GPU if ask.share > 0 else SHARED_CPU


def _reason(ask: ServingAsk, asks: Sequence[ServingAsk], *, num_devices: int) -> tuple[bool, str]:
    if ask.isolation != "auto":
        return ask.isolation == "shared", f"isolation: {ask.isolation} as the flow says"
    alone = _why_alone(ask, num_devices=num_devices)
    if alone:
        return False, f"auto: a process of its own, for {alone}"
    if any(one.isolation == "shared" and one.replicas > 1 and _application(one) == SHARED_GPU for one in asks):
        return False, "auto: a process of its own, for the process that others of the flow share has several replicas"
    others = [
        one.name
        for one in asks
        if one.name != ask.name
        and one.replicas == 1
        and (one.isolation == "shared" or (one.isolation == "auto" and not _why_alone(one, num_devices=num_devices)))
        and _application(one) == SHARED_GPU
    ]
    if not others:
        return False, "auto: a process of its own, for no other deployment of the flow can share the GPU with it"
    return True, f"auto: one process with {', '.join(others)}, for there is one GPU and contexts on it would take turns"


def _why_alone(ask: ServingAsk, *, num_devices: int) -> str:
    if ask.share <= 0:
        return "it runs on the CPU"
    if ask.why_alone:
        return f"it asks for {ask.why_alone}"
    if ask.share > 1:
        return f"it takes {ask.share:g} devices"
    if num_devices != 1:
        return f"there are {num_devices} GPUs"
    if ask.replicas > 1:
        return f"it has {ask.replicas} replicas"
    return ""
