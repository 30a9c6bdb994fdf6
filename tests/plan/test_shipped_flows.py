"""Every shipped flow is right, and what it names is part of its identity."""

from pathlib import Path

import pytest

from pipeline.errors import ParameterError, SpecError
from pipeline.plan.graph import open_flow
from pipeline.plan.inputs import source_paths
from pipeline.stages.model_identity import digests
from pipeline.stages.parameters import TrainFsdpParameters

FLOWS = Path(__file__).resolve().parents[2] / "flows"
NEEDED = dict.fromkeys(("embeddings.yaml", "canary.yaml", "finetune.yaml"), ("source=somewhere",))
"""Parameters without a default."""


@pytest.mark.parametrize("path", sorted(FLOWS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_flow_ends_in_a_deployment(path: Path) -> None:
    flow = open_flow(path, overrides=NEEDED.get(path.name, ()))
    assert flow.spec.name == path.stem
    assert flow.stages[-1].kind.name == "deploy.serve"


def test_a_canary_is_held_after_its_shadow_with_the_share_that_is_asked_for() -> None:
    given = open_flow(FLOWS / "canary.yaml", overrides=("source=somewhere", "percent=25")).stages[-1].parameters
    assert given.canary.percent == 25.0
    assert given.shadow.rules.min_requests == 50


def test_a_module_of_the_users_own_is_identified_by_its_source_and_its_factory(tmp_path: Path) -> None:
    def parameters(model: str) -> TrainFsdpParameters:
        return TrainFsdpParameters(dataset="${stages.data.outputs.dataset}", model=model, steps=1)

    (tmp_path / "own.py").write_text("def one(): ...\ndef two(): ...\n")
    one = digests(parameters("own:one"), tmp_path)
    assert one != digests(parameters("own:two"), tmp_path)
    (tmp_path / "own.py").write_text("def one(): return 1\ndef two(): ...\n")
    assert one != digests(parameters("own:one"), tmp_path)
    assert digests(parameters("configs/model.json"), tmp_path) == {}
    assert list(source_paths(TrainFsdpParameters, {"model": "own:one", "sources": ["more.py"]})) == [
        ("sources.0", "more.py")
    ]


def test_weights_from_elsewhere_are_identified_by_content_and_those_of_the_flow_by_their_stage(tmp_path: Path) -> None:
    def of(initial: str) -> dict[str, str]:
        given = TrainFsdpParameters(dataset="${stages.data.outputs.dataset}", initial=initial, steps=1)
        return dict(digests(given, tmp_path))

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"1")
    before = of("one")
    assert before["initial"].startswith("sha256:")
    (tmp_path / "one").rename(tmp_path / "two")
    assert of(str(tmp_path / "two")) == before
    (tmp_path / "two" / "model.safetensors").write_bytes(b"2")
    assert of("two") != before
    assert of("${stages.base.outputs.checkpoint}") == {}
    with pytest.raises(ParameterError, match="no such file or directory"):
        of("absent")


def test_a_place_of_weights_takes_no_other_output_and_no_half_reference(tmp_path: Path) -> None:
    text = (FLOWS / "finetune.yaml").read_text()
    (tmp_path / "flow.yaml").write_text(
        text.replace("initial: ${stages.base.outputs.checkpoint}", "initial: ${stages.data.outputs.dataset}")
    )
    with pytest.raises(SpecError, match="is a dataset, and this takes a checkpoint"):
        open_flow(tmp_path / "flow.yaml", overrides=("source=somewhere",))
    (tmp_path / "flow.yaml").write_text(
        text.replace("initial: ${stages.base.outputs.checkpoint}", "initial: at/${stages.base.outputs.checkpoint}")
    )
    with pytest.raises(SpecError, match="is an artifact, and this takes text"):
        open_flow(tmp_path / "flow.yaml", overrides=("source=somewhere",))
