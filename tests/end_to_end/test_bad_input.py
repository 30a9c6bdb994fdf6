"""What a user gets wrong ends with a clear error and the right code before anything starts."""

from pathlib import Path

import pytest
from flow_project import FLOW, Project, write_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return write_project(tmp_path, FLOW)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("steps: ${params.steps}", "stepz: ${params.steps}"), ["stepz", "did you mean 'steps'", "flow.yaml:"]),
        (("uses: data.text", "uses: data.txt"), ["data.txt", "data.text"]),
        (("stages.data.outputs.dataset", "stages.dat.outputs.dataset"), ["dat", "data"]),
        (("stages.data.outputs.dataset", "stages.data.outputs.datasets"), ["datasets", "dataset"]),
        (("stages.data.outputs.dataset", "stages.train.outputs.checkpoint"), ["train"]),
        (("vocabulary_size: 512", "vocabulary_size: many"), ["vocabulary_size", "many"]),
        (("model: model.json", "model: nosuch.json"), ["nosuch.json"]),
        (("learning_rate: ${params.learning_rate}", "device: cuda"), ["cuda", "no GPU"]),
        (("workers: 2, cpus: 0.5", "workers: 64, cpus: 2"), ["128", "CPUs"]),
        (("source: text", "source: nosuch/*.txt"), ["nosuch/*.txt"]),
    ],
    ids=lambda value: value[1].strip() if isinstance(value, tuple) else "",
)
def test_a_wrong_flow_is_refused_before_anything_starts(project: Project, change, words) -> None:
    flow = FLOW.replace(*change)
    if "device: cuda" in flow:
        flow = flow.replace("  learning_rate: 3e-3\n", "")  # a parameter nobody reads is a problem too
    (project.root / "flow.yaml").write_text(flow)
    done = project.run("run", "flow.yaml", "--no-tracking", code=2)
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.state / "head.json").exists()


def test_several_problems_are_told_at_once(project: Project) -> None:
    flow = FLOW.replace("vocabulary_size: 512", "vocabulary_size: many").replace(
        "model: model.json", "modl: model.json"
    )
    (project.root / "flow.yaml").write_text(flow)
    stderr = project.run("validate", "flow.yaml", code=2).stderr
    assert "many" in stderr
    assert "modl" in stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nosuch.yaml"], 2, "nosuch.yaml"),
        (["run", "flow.yaml", "-P", "stepz=3"], 2, "stepz"),
        (["run", "flow.yaml", "-P", "steps=three"], 2, "three"),
        (["run", "flow.yaml", "--force", "nosuch"], 2, "nosuch"),
        (["run", "flow.yaml", "--cluster", "nosuch.yaml"], 2, "nosuch.yaml"),
        (["run", "flow.yaml", "--store", "model.json/store"], 3, "store: cannot"),
        (["run", "flow.yaml", "--address", "127.0.0.1:1", "--no-tracking"], 3, "127.0.0.1:1"),
        (["rerun", "nosuch"], 2, "no run"),
        (["show", "nosuch"], 2, "no run"),
        (["bench", "trian"], 2, "train"),
        (["nosuchverb"], 2, "nosuchverb"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_refused(project: Project, arguments, code, words) -> None:
    done = project.run(*arguments, code=code)
    assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
