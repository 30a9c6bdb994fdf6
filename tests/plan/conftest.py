from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pipeline.plan.graph import open_flow_text

# A busy machine must not turn a slow example into a failure; each test has pytest's own timeout.
settings.register_profile("flows", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flows")

CHAIN = """\
flow: chain
params:
  steps: 150
stages:
  data:
    uses: data.text
    with: {source: stdlib}
  train:
    uses: train.fsdp
    with:
      dataset: ${stages.data.outputs.dataset}
      model: model.json
      steps: ${params.steps}
    resources: {workers: 2}
    gates: {validation_loss: "<= 6"}
  flax:
    uses: convert.flax
    with: {checkpoint: "${stages.train.outputs.checkpoint}"}
"""


@pytest.fixture
def chain():
    """The text of a small flow of three stages."""
    return CHAIN


@pytest.fixture
def project(tmp_path) -> Path:
    """A project directory with a model config."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "model.json").write_text('{"hidden_size": 8}')
    return tmp_path


@pytest.fixture
def open_text(project):
    """Open a flow text as a file of the project."""

    def open_one(text, *overrides, file="flow.yaml"):
        return open_flow_text(text, file=project / file, overrides=overrides)

    return open_one
