"""Every shipped flow is right, and what it names is part of its identity."""

from pathlib import Path

import pytest

from pipeline.plan.graph import open_flow
from pipeline.plan.inputs import source_paths
from pipeline.stages.model_identity import digests
from pipeline.stages.parameters import TrainFsdpParameters

FLOWS = Path(__file__).resolve().parents[2] / "flows"
NEEDED = {name: ("source=somewhere",) for name in ("embeddings.yaml", "canary.yaml", "finetune.yaml")}
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
