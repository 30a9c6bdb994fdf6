"""Which deployments share a process."""

import pytest

from pipeline.cluster.isolation import (
    SHARED_CPU,
    SHARED_GPU,
    ServingAsk,
    ServingPlan,
    serving_processes,
    why_not_shared,
)
from pipeline.cluster.ledger import why_oversubscribed


def ask(name, share=0.25, **more):
    return ServingAsk(name=name, share=share, **more)


def test_on_one_gpu_open_deployments_share_one_process_with_the_sum_of_their_shares():
    (process,) = serving_processes([ask("chat"), ask("embed", 0.5)], num_devices=1)
    assert (process.application, process.deployments) == (SHARED_GPU, ("chat", "embed"))
    assert process.share == 0.75 and process.is_shared
    assert process.reason == ("auto: one process with embed, for there is one GPU and contexts on it would take turns")


def test_a_shared_process_has_one_device_at_most_and_the_ledger_counts_it_once():
    asks = [ask(name, 0.4) for name in "abc"]
    (process,) = serving_processes(asks, num_devices=1)
    assert process.share == 1.0
    assert why_oversubscribed([process.claim], num_devices=1, source="x") is None
    apart = serving_processes([ask(name, 0.4, isolation="process") for name in "abc"], num_devices=1)
    assert len(apart) == 3
    assert "1.2 together" in why_oversubscribed([one.claim for one in apart], num_devices=1, source="x")


@pytest.mark.parametrize(
    ("alone", "num_devices", "words"),
    [
        (ask("a", 0.0), 1, "it runs on the CPU"),
        (ask("a", why_alone="a mesh"), 1, "it asks for a mesh"),
        (ask("a", 2.0), 1, "it takes 2 devices"),
        (ask("a"), 2, "there are 2 GPUs"),
        (ask("a", replicas=3), 1, "it has 3 replicas"),
        (ask("a", isolation="process"), 1, "as the flow says"),
    ],
)
def test_a_deployment_that_cannot_share_says_why(alone, num_devices, words):
    plan = ServingPlan(asks=(alone, ask("b"), ask("c")), num_devices=num_devices)
    assert ServingPlan.from_text(plan.to_text()) == plan
    process = plan.process_of("a")
    assert process.deployments == ("a",) and not process.is_shared
    assert words in process.reason
    assert plan.process_of("b").deployments == (("b", "c") if num_devices == 1 else ("b",))


def test_nobody_is_drawn_into_a_shared_process_of_several_replicas():
    asks = (ask("a"), ask("d"), ask("b", isolation="shared", replicas=2))
    plan = ServingPlan(asks=asks, num_devices=1)
    assert plan.process_of("a").deployments == ("a",)
    assert "several replicas" in plan.process_of("a").reason
    assert plan.process_of("b").deployments == ("b",)


def test_a_deployment_alone_has_a_process_of_its_own_name():
    (process,) = serving_processes([ask("chat")], num_devices=1)
    assert (process.application, process.is_shared, process.share) == ("chat", False, 0.25)


def test_sharing_that_is_asked_for_is_given_on_a_cpu_and_on_many_gpus():
    for share, application in ((0.0, SHARED_CPU), (0.25, SHARED_GPU)):
        asks = [ask("a", share, isolation="shared"), ask("b", share, isolation="shared")]
        (process,) = serving_processes(asks, num_devices=4)
        assert process.application == application and process.deployments == ("a", "b")


def test_sharing_that_cannot_be_given_is_refused_all_at_once():
    lines = why_not_shared(
        [
            ask("a", isolation="shared", why_alone="a mesh"),
            ask("b", isolation="shared", replicas=2),
            ask("c", 2.0, isolation="shared"),
            ask("d", why_alone="a mesh"),
        ]
    )
    assert len(lines) == 3
    for line, words in zip(lines, ("go with a mesh", "gpus: 2", "'a' 1, 'b' 2, 'c' 1"), strict=True):
        assert words in line
