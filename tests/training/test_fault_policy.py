"""Deadlines are nested, and a flow that says otherwise is refused as a whole."""

import pytest
from pydantic import ValidationError

from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.train_fault_parameters import FaultParameters, NonFiniteParameters, PreemptionParameters
from pipeline.training.fault_policy import FaultPolicy, NonFinitePolicy, Preemption, deadline_problems


def test_every_deadline_in_the_wrong_order_is_named_at_once() -> None:
    found = deadline_problems(
        collective_timeout_seconds=20, step_timeout_seconds=10, start_timeout_seconds=10, stage_timeout_seconds=5
    )
    assert found == [
        "collective_timeout_seconds is 20 and must be below step_timeout_seconds, which is 10",
        "step_timeout_seconds is 10 and must be below start_timeout_seconds, which is 10",
        "the health check (step_timeout_seconds + 60) is 70 and must be below the stage's timeout_seconds, which is 5",
        "start_timeout_seconds is 10 and must be below the stage's timeout_seconds, which is 5",
    ]


def test_defaults_are_nested_and_the_same_for_flows_and_jobs() -> None:
    FaultParameters()
    assert FaultPolicy(**{**FaultParameters().model_dump(), "non_finite": NonFinitePolicy()}) == FaultPolicy()
    assert NonFiniteParameters().model_dump() == {"skip": NonFinitePolicy().skip, "then": NonFinitePolicy().then}
    given = PreemptionParameters().model_dump()
    assert Preemption(signals=tuple(given["signals"]), grace_seconds=given["grace_seconds"]) == Preemption()


def test_nccl_which_ends_a_process_gives_up_after_everybody_who_can_name_a_rank() -> None:
    policy = FaultPolicy(collective_timeout_seconds=5, step_timeout_seconds=20, start_timeout_seconds=30)
    assert policy.group_timeout_seconds("cpu") == 5
    assert policy.group_timeout_seconds("cuda") > max(policy.start_timeout_seconds, policy.health_check_timeout_seconds)


def test_a_job_refuses_deadlines_that_are_not_nested() -> None:
    with pytest.raises(ValueError, match="step_timeout_seconds is 600 and must be below start_timeout_seconds"):
        FaultPolicy(start_timeout_seconds=500.0)


def test_a_stage_refuses_deadlines_that_are_not_nested() -> None:
    fields = {"dataset": "${stages.data.outputs.dataset}", "model": "model.json", "steps": 1}
    with pytest.raises(ValidationError, match=r"collective_timeout_seconds is 900.*step_timeout_seconds is 600"):
        TrainFsdpParameters(**fields, faults={"collective_timeout_seconds": 900, "start_timeout_seconds": 500})
