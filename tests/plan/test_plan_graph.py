import pytest

from pipeline.errors import SpecError
from pipeline.plan.graph import dependents, levels, open_flow, resolve
from pipeline.stages.reference import OutputReference

ANY = "flow: f\nstages:\n"


def converts(*edges):
    """A flow of python.call stages; an edge `b<a,c` makes b read outputs of a and c."""
    lines = []
    for edge in edges:
        name, _, needs = edge.partition("<")
        inputs = ", ".join(f"{need}: '${{stages.{need}.outputs.out}}'" for need in needs.split(",") if need)
        lines.append(f"  {name}: {{uses: python.call, with: {{call: 'm:f', outputs: [out], inputs: {{{inputs}}}}}}}\n")
    return ANY + "".join(lines)


@pytest.fixture
def problems_of(open_text):
    def problems(text, *overrides):
        with pytest.raises(SpecError) as caught:
            open_text(text, *overrides)
        return caught.value.problems

    return problems


def test_a_resolved_stage_is_typed(open_text, chain, project):
    train = open_text(chain, "steps=200").stages[1]
    assert train.parameters.steps == 200
    assert train.parameters.learning_rate == 1e-3
    assert train.inputs == {"dataset": OutputReference(stage="data", output="dataset")}
    assert train.needs == ("data",)
    assert train.outputs == {"checkpoint": "checkpoint"}
    assert (train.resources.workers, train.resources.cpus) == (2, 0.5)
    assert train.gates[0].metric == "validation_loss"
    assert train.source_files == {"model": project.resolve() / "model.json"}
    assert train.display["dataset"] == "${stages.data.outputs.dataset}"
    assert train.display["weight_decay"] == 0.1


def test_a_flow_that_is_read_can_be_resolved_alone(open_text, chain):
    flow = open_text(chain)
    assert resolve(flow.spec) == flow.stages


def test_order_is_topological_and_stable(open_text):
    stages = open_text(converts("z", "d<b,c", "b<a", "c<a", "a", "y")).stages
    assert [stage.name for stage in stages] == ["z", "a", "b", "c", "d", "y"]
    assert levels(stages) == (("z", "a", "y"), ("b", "c"), ("d",))
    assert dependents(stages, "b") == ("d",)
    assert dependents(stages, "a") == ("b", "c", "d")


def test_items_of_lists_and_mappings_are_inputs_of_their_own(open_text):
    text = converts("a", "b", "c<a,b")
    assert set(open_text(text).stages[2].inputs) == {"inputs.a", "inputs.b"}


def test_python_call_declares_its_outputs(open_text, problems_of):
    assert open_text(converts("a")).stages[0].outputs == {"out": "files"}
    (problem,) = problems_of(converts("a", "b<a").replace("a.outputs.out", "a.outputs.uot"))
    assert (problem.code, problem.allowed, problem.nearest) == ("unknown-output", ("out",), "out")


def test_a_cycle_names_every_stage_in_it(problems_of):
    problems = problems_of(converts("a<c", "b<a", "c<b", "behind<a", "free"))
    (problem,) = problems
    assert problem.code == "cycle"
    assert problem.found.endswith("a needs c, c needs b, b needs a")
    assert "behind" not in problem.found
    assert problem.path == "stages.a.with.inputs.c"


def test_every_cycle_is_told(problems_of):
    problems = problems_of(converts("a<b", "b<a", "c<d", "d<c,a", "e<e"))
    assert sorted(problem.code for problem in problems) == ["cycle", "cycle", "self-reference"]


def test_a_long_chain_is_no_trouble(open_text):
    edges = ["s0"] + [f"s{n}<s{n - 1}" for n in range(1, 400)]
    assert len(levels(open_text(converts(*edges)).stages)) == 400


@pytest.mark.parametrize(
    ("old", "new", "code", "where", "nearest"),
    [
        ("data.text", "data.txet", "unknown-kind", "stages.data.uses", "data.text"),
        ("stages.data.outputs", "stages.dta.outputs", "unknown-stage", "stages.train.with.dataset", "data"),
        ("outputs.dataset", "outputs.datset", "unknown-output", "stages.train.with.dataset", "dataset"),
        ("validation_loss", "validation_lss", "unknown-metric", "stages.train.gates.validation_lss", "validation_loss"),
        ("model.json", "modle.json", "missing-file", "stages.train.with.model", "model.json"),
        ("model: ", "modle: ", "unknown-key", "stages.train.with.modle", "model"),
    ],
)
def test_misspellings_are_found_and_corrected(problems_of, chain, old, new, code, where, nearest):
    problem = next(problem for problem in problems_of(chain.replace(old, new)) if problem.code == code)
    assert (problem.path, problem.nearest) == (where, nearest)


def test_deadlines_of_a_gang_fit_into_that_of_its_stage(open_text, problems_of, chain):
    short = chain.replace("    resources: {workers: 2}\n", "    resources: {workers: 2}\n    timeout_seconds: 60\n")
    open_text(short)  # a default that is longer does no harm
    given = short.replace("    with:\n", "    with:\n      faults: {step_timeout_seconds: 400}\n")
    assert [(problem.code, problem.path) for problem in problems_of(given)] == [("wrong-order", "stages.train")] * 2
    assert "must be below the stage's timeout_seconds, which is 60" in problems_of(given)[0].found
    assert problems_of(given)[0].position.line == given[: given.index("timeout_seconds: 60")].count("\n") + 1


def test_an_unknown_output_says_what_the_stage_produces(problems_of, chain):
    (problem,) = problems_of(chain.replace("outputs.checkpoint", "outputs.model"))
    assert problem.found == "the stage 'train' (train.fsdp) has no output 'model'"
    assert problem.allowed == ("checkpoint",)


def test_an_artifact_of_the_wrong_type_names_those_that_fit(problems_of, chain):
    (problem,) = problems_of(chain.replace("stages.train.outputs.checkpoint", "stages.data.outputs.dataset"))
    assert problem.code == "wrong-artifact"
    assert "is a dataset, and this takes a checkpoint" in problem.found
    assert problem.allowed == ("${stages.train.outputs.checkpoint}",)


@pytest.mark.parametrize("written", ["data", "'${stages.data.dataset}'", "5", "[a]", "~", "''"])
def test_text_in_place_of_an_artifact_names_those_that_fit(problems_of, chain, written):
    problems = problems_of(chain.replace("dataset: ${stages.data.outputs.dataset}", f"dataset: {written}"))
    assert ("${stages.data.outputs.dataset}",) in [problem.allowed for problem in problems]


def test_a_missing_artifact_names_those_that_fit(problems_of, chain):
    (problem,) = problems_of(chain.replace("      dataset: ${stages.data.outputs.dataset}\n", ""))
    assert (problem.code, problem.allowed) == ("missing-key", ("${stages.data.outputs.dataset}",))


def test_workers_belong_to_gangs(problems_of, chain):
    (problem,) = problems_of(chain + "    resources: {workers: 2}\n")
    assert problem.path == "stages.flax.resources.workers"
    assert "train.fsdp" in problem.hint


def test_grammar_and_kinds_complain_together(problems_of, chain):
    text = chain.replace("flow: chain", "flow: my chain").replace("steps: ${params.steps}", "steps: 0")
    text = text.replace("outputs.checkpoint", "outputs.model") + "    timeout: 5\n"
    codes = [problem.code for problem in problems_of(text, "stps=5")]
    assert codes == [
        "unknown-parameter",
        "wrong-name",
        "unused-parameter",
        "out-of-range",
        "unknown-output",
        "unknown-key",
    ]


def test_a_model_that_is_a_directory(problems_of, chain, project):
    (project / "models").mkdir()
    (problem,) = problems_of(chain.replace("model.json", "models"))
    assert "is a directory" in problem.found


def test_a_missing_file_is_told_beside_other_problems(problems_of, chain):
    text = chain.replace("model.json", "modle.json").replace("steps: ${params.steps}", "steps: '${params.steps}0'")
    assert {problem.code for problem in problems_of(text)} == {"missing-file", "wrong-type"}


def test_a_flow_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="there is no file"):
        open_flow(tmp_path / "flow.yaml")
