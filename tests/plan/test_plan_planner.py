import pytest

from pipeline.artifacts.commit import Commit, CommittedOutput
from pipeline.errors import UsageError
from pipeline.plan.planner import Action, age_in_words, make_plan, plan_stage
from pipeline.stages.registry import KINDS

NOW = 1_000_000.0


class World:
    """Commits by fingerprint, as a store would have them."""

    def __init__(self):
        self.commits = {}
        self.previous = {}
        self.damage = {}
        self.sources = {}

    def plan(self, stages, *, force=()):
        return make_plan(
            stages,
            lookup=self.commits.get,
            sources=lambda stage: self.sources.get(stage.name, {}),
            verify=lambda stage, commit: self.damage.get(stage.name),
            previous=self.previous,
            force=frozenset(force),
            now=NOW,
        )

    def run(self, stages, *, content="", force=()):
        """Commit what a run would compute; `content` stands for what the outputs hold."""
        done = {}
        for stage in stages:
            planned = plan_stage(
                stage,
                commits=done,
                lookup=self.commits.get,
                sources=lambda stage: self.sources.get(stage.name, {}),
                verify=lambda stage, commit: self.damage.get(stage.name),
                previous=self.previous,
                force=frozenset(force),
                now=NOW,
            )
            commit = planned.commit or Commit(
                fingerprint=planned.fingerprint,
                attempt_key="a",
                kind=stage.kind.name,
                stage=stage.name,
                flow="chain",
                run_id="3f2a",
                created_at=NOW - 7300,
                outputs={
                    name: CommittedOutput(type=kind, digest=f"{content or planned.fingerprint}-{name}", files=())
                    for name, kind in stage.outputs.items()
                },
                parts=planned.parts,
            )
            done[stage.name] = commit
            self.commits[commit.fingerprint] = commit
            self.previous[stage.name] = commit.parts
        return done


@pytest.fixture
def world():
    return World()


def told(plan):
    return [(planned.stage.name, planned.action, planned.reason) for planned in plan.stages]


def test_a_first_plan_runs_the_start_and_waits_for_the_rest(world, open_text, chain):
    plan = world.plan(open_text(chain).stages)
    assert told(plan) == [
        ("data", Action.RUN, "never run"),
        ("train", Action.WAIT_FOR_INPUTS, "fingerprint known when data is done"),
        ("flax", Action.WAIT_FOR_INPUTS, "fingerprint known when train is done"),
    ]
    assert plan["data"].fingerprint and plan["train"].fingerprint is None
    assert plan.num_reused == 0


def test_a_second_plan_reuses_everything_and_says_from_where(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    plan = world.plan(stages)
    assert [planned.action for planned in plan.stages] == [Action.REUSE] * 3
    assert plan["train"].reason == "same fingerprint as run 3f2a (2 h ago)"
    assert plan["train"].commit is not None
    assert plan.num_reused == 3


def test_one_changed_parameter_runs_that_stage_and_what_depends_on_it(world, open_text, chain):
    world.run(open_text(chain).stages)
    plan = world.plan(open_text(chain, "steps=200").stages)
    assert told(plan) == [
        ("data", Action.REUSE, "same fingerprint as run 3f2a (2 h ago)"),
        ("train", Action.RUN, "parameter steps: 150 -> 200"),
        ("flax", Action.WAIT_FOR_INPUTS, "fingerprint known when train is done"),
    ]


def test_equal_content_of_a_new_artifact_stops_the_rerun_there(world, open_text, chain):
    world.run(open_text(chain).stages, content="same")
    other = open_text(chain, "steps=200").stages
    world.run(other[:2], content="same")
    plan = world.plan(other)
    assert [planned.action for planned in plan.stages] == [Action.REUSE] * 3


def test_a_changed_input_is_named(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    other = open_text(chain.replace("source: stdlib", "source: stdlib, seed: 1")).stages
    world.run(other[:1])
    plan = world.plan(other)
    assert plan["train"].reason == "input dataset changed"


def test_a_changed_file_and_a_changed_source_are_named(world, open_text, chain, project):
    stages = open_text(chain).stages
    world.run(stages)
    (project / "model.json").write_text("{}")
    assert world.plan(stages)["train"].reason == "content of model changed"
    world.sources["data"] = {"source": "x"}
    assert world.plan(stages)["data"].reason == "content of source added"


def test_a_new_version_of_a_kind_is_named(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    world.previous["data"] = {**world.previous["data"], "version": 0}
    world.commits.clear()
    assert world.plan(stages)["data"].reason == f"kind version 0 -> {KINDS['data.text'].version}"


def test_many_changes_are_cut_short(world, open_text, chain):
    world.run(open_text(chain).stages)
    text = chain.replace("source: stdlib", "seed: 1, vocabulary_size: 300, sequence_length: 64, json_field: text")
    reason = world.plan(open_text(text).stages)["data"].reason
    assert reason == (
        "parameter json_field: None -> 'text'; parameter seed: 0 -> 1; parameter sequence_length: 256 -> 64; and 1 more"
    )


def test_a_damaged_artifact_runs_again_and_says_why(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    world.damage["train"] = "model.bin is missing"
    plan = world.plan(stages)
    assert plan["train"].action is Action.RUN
    assert plan["train"].reason == "committed artifact does not verify: model.bin is missing"
    assert plan["flax"].action is Action.WAIT_FOR_INPUTS


def test_an_artifact_that_is_gone_is_told(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    world.commits.clear()
    assert world.plan(stages)["data"].reason == "its committed artifact is gone from the store"


def test_force_runs_what_is_committed(world, open_text, chain):
    stages = open_text(chain).stages
    world.run(stages)
    plan = world.plan(stages, force=["train"])
    assert [planned.action for planned in plan.stages] == [Action.REUSE, Action.RUN, Action.WAIT_FOR_INPUTS]
    assert plan["train"].reason == "forced"


def test_force_of_nothing_names_the_nearest(world, open_text, chain):
    with pytest.raises(UsageError, match=r"did you mean 'train'"):
        world.plan(open_text(chain).stages, force=["trian"])


def test_an_artifact_of_another_stage_is_named_as_such(world, open_text, chain):
    world.run(open_text(chain).stages)
    renamed = chain.replace("  data:\n", "  text:\n").replace("stages.data.", "stages.text.")
    reason = world.plan(open_text(renamed).stages)["text"].reason
    assert reason == "same fingerprint as run 3f2a (stage data of flow chain) (2 h ago)"


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_ages_are_whole_units(seconds, words):
    assert age_in_words(seconds) == words
