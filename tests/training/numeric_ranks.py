"""What two ranks compute in tests of numerics. Importable by name from other processes."""

import math
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipeline.errors import ClusterError
from pipeline.training.accumulation import accumulate
from pipeline.training.parallel.mesh import make_mesh, plan_mesh
from pipeline.training.parallel.sharding import check_reductions
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.step import take_step
from pipeline.training.updates.muon import WholeMatrixMuon
from pipeline.training.worker import WorkerContext, joined


@dataclass
class Found:
    """What one rank saw."""

    norms: dict[str, list[float]] = field(default_factory=dict)
    """Of each job, in its steps."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Sums over all ranks, in the same steps."""
    validations: dict[str, dict[str, float]] = field(default_factory=dict)
    muon_differences: list[float] = field(default_factory=list)
    """Between the update of a sharded matrix and that of the whole one, over the largest element of the update."""
    different_gradients: dict[str, list[str]] = field(default_factory=dict)
    """Names whose gradient is not that of the first job, to the bit."""
    after_nan: dict[str, Any] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    buffers: dict[str, list[float]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """What is said before step 1 where gradients are summed for averaged, and where an all-reduce reduces nothing."""


def take_steps(worker: WorkerContext, jobs: dict[str, TrainJob], *, steps: int) -> Found:
    """Norms, losses and validations of the first steps of each job; also called in the test's own process."""
    found = Found()
    for name, job in jobs.items():
        session = open_session(worker, job)
        found.norms[name], found.losses[name] = [], []
        for step in range(steps):
            outcome = take_step(session, step)
            total = outcome.loss_sum.double()
            dist.all_reduce(total)
            found.norms[name].append(outcome.gradient_norm)
            found.losses[name].append(float(total))
        found.validations[name] = validations(session)
        found.devices |= {str(each.device.type) for each in session.parameters}
        found.devices |= {each.device_mesh.device_type for each in session.parameters if isinstance(each, DTensor)}
        found.buffers[name] = [float(buffer.double().sum()) for buffer in session.model.buffers()]
    return found


def validations(session: Session) -> dict[str, float]:
    """Held-out losses of the parameters, of their average, and of the parameters again."""

    def measure() -> float:
        return session.task.validate(session.model, session.worker, max_rows=7, micro_batch_rows=2)["validation_loss"]

    values = {"before": measure()}
    if session.average is not None:
        with session.average.lent():
            values["average"] = measure()
        values["after"] = measure()
    return values


def numerics(
    worker: WorkerContext,
    jobs: dict[str, TrainJob],
    *,
    steps: int,
    muon: TrainJob,
    recomputing: dict[str, TrainJob],
    half: TrainJob,
) -> Found:
    """All that two ranks are asked, in one start."""
    with joined(worker):
        inner = replace(worker, store_address=None)
        # A process that sees a GPU must not put on it what the mesh says is on the CPU (pytorch issue 132471).
        is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            found = take_steps(inner, jobs, steps=steps)
        finally:
            torch.cuda.is_available = is_available
        found.muon_differences = sharded_muon(inner, muon)
        found.different_gradients = recomputed_gradients(inner, recomputing)
        found.after_nan = nan_on_the_last_rank(inner, half)
        found.refusals = wrong_reductions(inner)
    return found


def wrong_reductions(worker: WorkerContext) -> list[str]:
    mesh = make_mesh(worker, plan_mesh("zero3", world_size=worker.world_size, shard_group=None)).fsdp

    def only_sum(layer: Any, mesh: Any) -> None:
        """As gloo did for AVG (pytorch issue 162338)."""
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)

    said = []
    for place, wrong in (("_divide_explicitly", only_sum), ("dist.all_reduce", lambda tensor: None)):
        with mock.patch(f"pipeline.training.parallel.sharding.{place}", wrong), pytest.raises(ClusterError) as caught:
            check_reductions(worker, mesh)
        said.append(caught.value.message)
    return said


def first_gradients(session: Session) -> None:
    rows = session.task.rows(0, plan=session.plan, worker=session.worker, seed=0)
    accumulate(session, rows, units=session.plan.units_per_step)


def sharded_muon(worker: WorkerContext, job: TrainJob) -> list[float]:
    session = open_session(worker, job)
    first_gradients(session)
    (group,) = [each for each in session.optimizer.param_groups if each["algorithm"] == "muon"]
    sharded = group["params"]
    whole = [torch.nn.Parameter(each.full_tensor().clone()) for each in sharded]
    before = [each.detach().clone() for each in whole]
    for ours, theirs in zip(whole, sharded, strict=True):
        ours.grad = theirs.grad.full_tensor()
    session.optimizer.step()
    reference = WholeMatrixMuon([{"params": whole, "weight_decay": group["weight_decay"]}], lr=group["lr"])
    reference.step()
    return [
        float((theirs.full_tensor() - ours).detach().abs().max() / (ours - start).detach().abs().max())
        for ours, theirs, start in zip(whole, sharded, before, strict=True)
    ]


def recomputed_gradients(worker: WorkerContext, jobs: dict[str, TrainJob]) -> dict[str, list[str]]:
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for kind, job in jobs.items():
        session = open_session(worker, job)
        first_gradients(session)
        gradients[kind] = {name: item.grad.to_local() for name, item in session.model.named_parameters()}
    first = next(iter(gradients.values()))
    return {
        kind: [name for name, value in own.items() if not torch.equal(value, first[name])]
        for kind, own in gradients.items()
    }


def nan_on_the_last_rank(worker: WorkerContext, job: TrainJob) -> dict[str, Any]:
    session = open_session(worker, job)
    take_step(session, 0)
    before = [each.to_local().clone() for each in session.parameters]
    loss_sum = session.task.loss_sum
    if worker.rank == worker.world_size - 1:
        session.task.loss_sum = lambda *given: loss_sum(*given) * math.nan
    outcome = take_step(session, 1)
    session.task.loss_sum = loss_sum
    kept = all(torch.equal(each.to_local(), value) for each, value in zip(session.parameters, before, strict=True))
    after = take_step(session, 2)
    return {
        "is_finite": outcome.is_finite,
        "norm": str(outcome.gradient_norm),
        "kept": kept,
        "scale": session.loss_scale.state_dict(),
        "next_norm": after.gradient_norm,
    }
