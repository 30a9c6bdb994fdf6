"""The fallback chain of a stage: read, checked, planned and written out again."""

import pytest

from pipeline.cluster.capacity import Capacity
from pipeline.errors import ClusterError, FailureClass, SpecError
from pipeline.execution.demand import check_here, demand_of, possible
from pipeline.plan.graph import open_flow_text
from pipeline.plan.resolved import resolved_text

SMALL = Capacity(cpus=2, gpus=0, memory_bytes=2**36, source="this machine")
FALLBACK = """    fallback:
      - resources: {workers: 1}
        on: [infra, gate]
      - with: {device: cpu, checkpoint_every_steps: 5}
        resources: {workers: {min: 1, max: 3}, labels: {ray.io/accelerator-type: L4}}
        timeout_seconds: 60
"""


def with_fallback(chain, fallback, *, after="    resources: {workers: 2}\n"):
    assert after in chain
    return chain.replace(after, after + fallback)


def test_each_hop_changes_the_stage_as_written(open_text, chain):
    train = open_text(with_fallback(chain, FALLBACK)).stages[1]
    first, second = train.fallback
    assert first.on == (FailureClass.INFRA, FailureClass.GATE)
    assert (first.stage.resources.workers, first.stage.parameters.device) == (1, "auto")
    assert (second.stage.resources.min_workers, second.stage.resources.workers) == (1, 3)
    assert (second.stage.parameters.device, second.stage.parameters.checkpoint_every_steps) == ("cpu", 5)
    assert second.stage.resources.labels == {"ray.io/accelerator-type": "L4"}
    assert second.stage.timeout_seconds == 60
    assert first.stage.timeout_seconds is None
    assert (second.stage.needs, second.stage.inputs) == (train.needs, train.inputs)
    assert str(first) == "workers 1 (on infra, gate)"


def test_the_resolved_text_keeps_the_chain(open_text, chain, tmp_path):
    flow = open_text(with_fallback(chain, FALLBACK))
    again = open_flow_text(resolved_text(flow), file=flow.spec.file)
    assert again.stages[1].fallback == flow.stages[1].fallback


def test_a_hop_that_only_repeats_the_timeout_of_its_stage_is_kept_too(open_text, chain):
    same = """    timeout_seconds: 60
    fallback:
      - timeout_seconds: 60
      - resources: {workers: 1}
"""
    flow = open_text(with_fallback(chain, same))
    again = open_flow_text(resolved_text(flow), file=flow.spec.file)
    assert again.stages[1].fallback == flow.stages[1].fallback
    assert [hop.stage.timeout_seconds for hop in again.stages[1].fallback] == [60, 60]


def test_a_hop_may_take_the_deadline_away_and_says_so_when_it_changes_nothing(open_text, chain):
    no_deadline = """    timeout_seconds: 60
    fallback:
      - timeout_seconds: null
      - timeout_seconds: 60
"""
    flow = open_text(with_fallback(chain, no_deadline))
    first, second = flow.stages[1].fallback
    assert (first.stage.timeout_seconds, second.stage.timeout_seconds) == (None, 60)
    assert str(second) == "the same again (on infra)"
    again = open_flow_text(resolved_text(flow), file=flow.spec.file)
    assert again.stages[1].fallback == flow.stages[1].fallback


@pytest.mark.parametrize("hop", ["with: 3", "with:", "resources: 7", "with: {}"])
def test_a_hop_whose_change_is_no_mapping_is_refused(open_text, chain, hop):
    with pytest.raises(SpecError, match="of a hop says what changes, as a mapping"):
        open_text(with_fallback(chain, f"    fallback:\n      - {hop}\n"))


def test_problems_of_all_hops_are_told_at_once_where_they_stand(open_text, chain):
    wrong = """    fallback:
      - with: {device: cud}
        on: [infra, gat]
      - resources: {workers: 0}
      - {}
      - with: {model: none.json}
      - keep: champion
"""
    with pytest.raises(SpecError) as caught:
        open_text(with_fallback(chain, wrong))
    start = with_fallback(chain, wrong).splitlines().index("    fallback:") + 1
    told = {(problem.position.line - start, problem.code) for problem in caught.value.problems}
    assert told == {
        (1, "wrong-value"),
        (2, "wrong-value"),
        (3, "out-of-range"),
        (4, "wrong-value"),
        (5, "missing-file"),
        (6, "wrong-value"),
    }


def test_a_hop_may_not_move_its_stage_in_the_graph(open_text, chain):
    moved = """    fallback:
      - with: {dataset: "${stages.more.outputs.dataset}"}
"""
    more = "  more:\n    uses: data.text\n    with: {source: python_standard_library}\n"
    with pytest.raises(SpecError, match="may not need stages that the stage does not need: more"):
        open_text(with_fallback(chain, moved) + more)


@pytest.mark.parametrize(
    ("workers", "found"),
    [("{min: 3, max: 2}", "min 3 is more than max 2"), ("{min: 1}", "'max' is missing"), ("5000", "out of range")],
)
def test_a_range_of_workers_is_checked(open_text, chain, workers, found):
    with pytest.raises(SpecError, match=found):
        open_text(chain.replace("{workers: 2}", f"{{workers: {workers}}}"))


def test_a_stage_that_cannot_run_here_starts_with_the_hop_that_can(open_text, chain):
    text = with_fallback(
        chain.replace("{workers: 2}", "{workers: 40}"), FALLBACK, after="    resources: {workers: 40}\n"
    )
    train = open_text(text).stages[1]
    assert possible(train, SMALL) is train.fallback[0].stage
    assert demand_of(train.fallback[1].stage, SMALL).cpus == 0.5  # an elastic gang needs room for its fewest workers
    with pytest.raises(ClusterError, match=r"'train' asks for 20 CPUs at once; this machine has 2"):
        check_here(train, SMALL)
    check_here(train.fallback[0].stage, SMALL)


def test_labels_are_for_what_the_product_places_itself(open_text, chain):
    deploy = """  serve:
    uses: deploy.serve
    with: {model: "${stages.flax.outputs.model}", name: tiny}
    resources: {labels: {zone: a}}
"""
    with pytest.raises(SpecError, match=r"deploy.serve places what it starts itself, and knows no labels"):
        open_text(chain + deploy)
    trained = open_text(chain.replace("{workers: 2}", "{workers: 2, labels: {zone: a}}")).stages[1]
    assert trained.resources.labels == {"zone": "a"}
