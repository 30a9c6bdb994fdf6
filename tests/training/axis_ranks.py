"""What ranks of meshes that cut the model run in tests. Importable by name from other processes."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_functions import Recorder, StoppedError, train_recorded
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from pipeline.errors import ClusterError
from pipeline.training.loop import TrainResult
from pipeline.training.parallel.replicas import check_replicas
from pipeline.training.session import Session, TrainJob, open_session
from pipeline.training.step import take_step
from pipeline.training.worker import WorkerContext, joined

STEPS = 3


@dataclass
class Taken:
    """The first steps of a job on one rank."""

    values: dict[str, float]
    """Losses and gradient norms of steps, and held-out losses before and after them."""
    parameters: dict[str, torch.Tensor]
    """Whole, after the steps; those of this rank's stage."""


def take_steps(worker: WorkerContext, jobs: list[TrainJob]) -> list[Taken]:
    with joined(worker):
        inner = replace(worker, store_address=None)
        return [_taken(open_session(inner, job)) for job in jobs]


def take_steps_and_resume(
    worker: WorkerContext, jobs: list[TrainJob], moves: list[tuple[TrainJob, TrainJob]], copied: list[TrainJob]
) -> tuple[list[Taken], list[tuple[TrainResult, Recorder]], list[str]]:
    """Also, train each first job until its rows stop, and the second from its checkpoint to the end.

    And what is said where one rank's copy of a parameter differs in one bit.
    """
    with joined(worker):
        inner = replace(worker, store_address=None)
        taken = [_taken(open_session(inner, job)) for job in jobs]
        moved = []
        for first, second in moves:
            try:
                train_recorded(inner, first)
            except StoppedError:
                dist.barrier()
            moved.append(train_recorded(inner, second))
        said = [_spoiled(open_session(inner, job)) for job in copied]
    return taken, moved, said


def _taken(session: Session) -> Taken:
    def held_out() -> float:
        return session.task.validate(session.model, session.worker, max_rows=5, micro_batch_rows=2)["validation_loss"]

    values = {"held out before": held_out()}
    for step in range(STEPS):
        outcome = take_step(session, step)
        total = outcome.loss_sum.double()
        dist.all_reduce(total)
        values[f"loss {step}"] = float(total) / outcome.units
        values[f"norm {step}"] = outcome.gradient_norm
    values["held out after"] = held_out()
    state: dict[str, Any] = get_model_state_dict(session.model)
    whole = {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in state.items()}
    return Taken(values=values, parameters={name: item.clone() for name, item in whole.items()})


def _spoiled(session: Session) -> str:
    check_replicas(session.model, session.mesh)
    if session.worker.rank == 1:
        norm = session.model.get_parameter("model.layers.0.input_layernorm.weight")
        norm.detach().to_local().view(torch.int32)[-1:] += 1
    with pytest.raises(ClusterError) as caught:
        check_replicas(session.model, session.mesh)
    return caught.value.message
