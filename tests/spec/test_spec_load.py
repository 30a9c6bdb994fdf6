from pathlib import Path

import pytest

from pipeline.errors import SpecError
from pipeline.settings import find_project_root
from pipeline.spec.gate import Gate
from pipeline.spec.load import load_flow

FLOW = """\
flow: demo
description: A demo.
params:
  steps: {type: int, default: 150, minimum: 1}
  limit: 6.0
stages:
  data:
    uses: data.text
    with:
      source: 007
  train:
    uses: train.fsdp
    description: The long one.
    with:
      dataset: ${stages.data.outputs.dataset}
      steps: ${params.steps}
    resources: {workers: 2, cpus: 0.5, memory: 2GiB}
    gates:
      validation_loss: "<= ${params.limit}"
      train_loss: < 5
    retry: {max_attempts: 5, backoff_seconds: 0.5}
    timeout_seconds: 600
"""


@pytest.fixture
def write(tmp_path):
    def write_flow(text):
        path = tmp_path / "flow.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_flow


def problems_of(path, *overrides):
    with pytest.raises(SpecError) as caught:
        load_flow(path, overrides=overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_flow_is_read_whole(write):
    path = write(FLOW)
    flow = load_flow(path, overrides=["steps=200"])
    assert (flow.name, flow.description, flow.text) == ("demo", "A demo.", FLOW)
    assert flow.params == {"steps": 200, "limit": 6.0}
    assert flow.file == path.resolve()
    assert flow.overrides == ("steps=200",)
    assert [stage.name for stage in flow.stages] == ["data", "train"]
    train = flow.stage("train")
    assert (train.uses, train.description, train.timeout_seconds) == ("train.fsdp", "The long one.", 600.0)
    assert (train.resources.workers, train.resources.cpus, train.resources.memory_bytes) == (2, 0.5, 2 * 2**30)
    assert (train.retry.max_attempts, train.retry.backoff_seconds) == (5, 0.5)
    assert train.gates == (
        Gate(metric="validation_loss", comparison="<=", limit=6.0),
        Gate(metric="train_loss", comparison="<", limit=5.0),
    )
    (reference,) = train.references()
    assert (reference.stage, reference.output, reference.path) == ("data", "dataset", "with.dataset")


def test_what_is_left_out_has_defaults(write):
    data = load_flow(write(FLOW)).stage("data")
    assert data.retry.max_attempts == 3
    assert data.resources.cpus is None
    assert data.gates == () and data.timeout_seconds is None


def test_every_path_has_its_position(write):
    train = load_flow(write(FLOW)).stage("train")
    assert (train.position().line, train.position().column) == (11, 3)
    assert (train.position("with.steps").line, train.position("with.steps").column) == (16, 14)
    assert train.position("gates.train_loss").line == 20
    assert train.position("with.not_there.0") == train.position("with")


def test_the_project_root_is_the_nearest_marked_directory(tmp_path):
    (tmp_path / "project" / "flows").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    assert find_project_root(tmp_path / "project" / "flows" / "a.yaml") == (tmp_path / "project").resolve()
    (tmp_path / "project" / "flows" / ".pipeline").mkdir()
    assert find_project_root(tmp_path / "project" / "flows" / "a.yaml").name == "flows"


def test_everything_wrong_is_told_at_once(write):
    text = """\
flow: my flow
descripton: x
params:
  steps: {type: int, default: 1.0}
  ghost: 5
stages:
  a:
    use: data.text
    with: 5
  b:
    uses: data.text
    with: {seed: "${params.sead}", source: "${param.x}"}
    gates: {m: about 5}
    resources: {worker: 2, cpus: -1, memory: much}
    needs: [a]
    timeout_seconds: 0
    retry: 3
"""
    problems = problems_of(write(text), "step=3", "x")
    found = [(problem.position.line, problem.code) for problem in problems]
    assert found == [
        (1, "unknown-parameter"),
        (2, "wrong-override"),
        (1, "wrong-name"),
        (2, "unknown-key"),
        (4, "unused-parameter"),
        (4, "wrong-type"),
        (5, "unused-parameter"),
        (7, "missing-key"),
        (8, "unknown-key"),
        (9, "wrong-type"),
        (12, "unknown-parameter"),
        (12, "wrong-reference"),
        (13, "wrong-gate"),
        (14, "unknown-key"),
        (14, "out-of-range"),
        (14, "wrong-value"),
        (15, "unknown-key"),
        (16, "out-of-range"),
        (17, "wrong-type"),
    ]
    assert problems[0].position.file == "-P"
    assert "stages.b.resources.worker" in {problem.path for problem in problems}


def test_a_problem_is_shown_with_place_path_and_way_out(write):
    path = write(FLOW.replace("resources:", "resorces:"))
    (problem,) = problems_of(path)
    assert str(problem).startswith(f"{path}:17:5 stages.train.resorces [unknown-key]")
    assert "allowed: uses," in str(problem) and "did you mean 'resources'?" in str(problem)


def test_needs_is_explained(write):
    (problem,) = problems_of(write(FLOW + "    needs: [data]\n"))
    assert "references" in problem.hint


@pytest.mark.parametrize("condition", ["5", "about 5", "<= x", "=> 5", "<= 1e999", "'<= 5 and >= 1'", "''"])
def test_gates_that_are_no_condition(write, condition):
    (problem,) = problems_of(write(FLOW.replace("< 5", condition)))
    assert problem.code == "wrong-gate"
    assert problem.path == "stages.train.gates.train_loss"
    assert "operator" in problem.allowed[0]


@pytest.mark.parametrize("memory", ["2GB", "512 MiB", "1024", "1.5GiB", "3TiB"])
def test_memory_has_units(write, memory):
    assert load_flow(write(FLOW.replace("2GiB", memory))).stage("train").resources.memory_bytes > 1000


@pytest.mark.parametrize("memory", ["2Gig", "-1GB", "[1]", "lots", "9" * 30])
def test_memory_that_is_none(write, memory):
    (problem,) = problems_of(write(FLOW.replace("2GiB", memory)))
    assert problem.path == "stages.train.resources.memory"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty-file"),
        ("# nothing\n", "empty-file"),
        ("- a\n", "wrong-type"),
        ("text\n", "wrong-type"),
        (b"flow: \xff\n", "not-utf-8"),
        ("flow: a\x00\n", "yaml-syntax"),
        ("flow: a\nstages: {}\n", "wrong-type"),
        ("flow: a\nstages:\n", "wrong-type"),
        ("flow: a\nstages: [x]\n", "wrong-type"),
        ("flow: a\n", "missing-key"),
        ("flow: a\nstages: {x: data.text}\n", "wrong-type"),
        ("flow: a\nstages: {x: {uses: [y]}}\n", "wrong-type"),
        ("flow: a\nstages: {'x y': {uses: y}}\n", "wrong-name"),
        ("flow: a\nstages: {x: {uses: '${params.k}'}}\n", "wrong-type"),
        ("flow: a\nstages: {x: {uses: y, timeout_seconds: '${stages.a.outputs.b}'}}\n", "unexpected-reference"),
    ],
)
def test_files_that_are_no_flow(write, text, code):
    assert code in {problem.code for problem in problems_of(write(text))}


def test_a_missing_file_names_the_nearest(tmp_path, write):
    write(FLOW)
    (problem,) = problems_of(tmp_path / "flo.yaml")
    assert (problem.code, problem.nearest) == ("missing-file", "flow.yaml")
    (problem,) = problems_of(tmp_path / "no" / "flow.yaml")
    assert "no directory" in problem.found


def test_a_directory_is_no_flow(tmp_path, write):
    write(FLOW)
    (problem,) = problems_of(tmp_path)
    assert problem.code == "not-a-file"
    assert "flow.yaml" in problem.hint


def test_a_name_no_file_can_have():
    assert problems_of(Path("a\0b"))[0].code == "unreadable-file"
    assert problems_of(Path("a" * 5000))[0].code == "unreadable-file"


def test_windows_line_ends_and_a_byte_order_mark_do_not_matter(write):
    flow = load_flow(write(b"\xef\xbb\xbf" + FLOW.replace("\n", "\r\n").encode()))
    assert flow.stage("train").position("with.steps").line == 16
