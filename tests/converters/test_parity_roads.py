"""Parity of models that no family describes: traced transformers, and modules of a user's own."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from converters.conversion import convert
from converters.model_pair import load_pair
from converters.parity import check_parity
from pipeline.errors import ConversionError, ParameterError
from pipeline.models.checkpoint import read_parameters, save_parameters
from pipeline.models.module_file import BATCH, InputSpec, ModuleFile

FACTORY = '''
import torch
from torch import nn


class Net(nn.Module):
    """An image and a table of numbers to five classes; every size differs from every other."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(2, width, (3, 2)), nn.Conv2d(width, 7, (2, 3))])
        self.norm = nn.BatchNorm2d(7)
        self.table = nn.Linear(3, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, pixels, numbers):
        x = pixels
        for block in self.blocks:
            x = torch.relu(block(x))
        x = self.norm(x).mean(dim=(2, 3)) + self.table(numbers)
        return {"logits": self.head(x)}


def build(width=11):
    return Net(width)
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a factory of its own, and the checkpoint of what it makes."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    ModuleFile(
        factory=f"{name}:build",
        arguments={"width": 13},
        inputs={
            "pixels": InputSpec(shape=(BATCH, 2, 9, 8), dtype="float32"),
            "numbers": InputSpec(shape=(BATCH, 3), dtype="float32"),
        },
    ).write(checkpoint)
    torch.manual_seed(3)
    model = __import__(name).build(width=13)
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2.0)
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    yield tmp_path
    sys.modules.pop(name, None)


def test_a_module_of_ones_own_holds_on_every_level(project):
    convert("checkpoint", to="flax")
    report = check_parity("checkpoint", "flax")
    assert report.passed, report.failures
    assert (report.road, report.name, report.kind) == ("trace", "traced", "predictor")
    assert set(report.inputs) == {"pixels", "numbers"}
    assert [block.torch_name for block in report.blocks] == ["blocks.0", "blocks.1"]
    (logits,) = report.outputs
    assert (logits.name, logits.shape[1]) == ("logits", 5)
    assert logits.max_kl is not None
    assert report.tensors.num_tensors == 13
    assert report.continuations == ()


def test_a_wrong_leaf_of_a_traced_module_is_named_with_its_block(project):
    convert("checkpoint", to="flax")
    leaves = read_parameters(project / "flax" / "params")
    (project / "flax" / "params").rename(project / "before")
    leaves["blocks.1.weight"] = leaves["blocks.1.weight"][::-1].copy()
    save_parameters(project / "flax" / "params", leaves)
    report = check_parity("checkpoint", "flax")
    assert report.tensors.differing == ("blocks.1.weight",)
    assert report.first_block_over_limit.name == "blocks.1"


def test_a_factory_that_has_changed_since_is_an_error_that_lists_what(project):
    convert("checkpoint", to="flax")
    described = ModuleFile.read(project / "checkpoint")
    ModuleFile(factory=described.factory, arguments={"width": 12}, inputs=described.inputs).write(
        project / "checkpoint"
    )
    with pytest.raises(ConversionError) as caught:
        load_pair(project / "checkpoint", model=project / "flax")
    assert "blocks.0.weight: checkpoint has shape (13, 2, 3, 2), module (12, 2, 3, 2)" in str(caught.value)
    assert "blocks.1.weight: checkpoint has shape" in str(caught.value)


def test_a_factory_that_is_not_there_is_a_parameter_error(project, tmp_path):
    convert("checkpoint", to="flax")
    described = ModuleFile.read(project / "checkpoint")
    ModuleFile(factory="absent_nets:build", inputs=described.inputs).write(project / "checkpoint")
    with pytest.raises(ParameterError, match="absent_nets"):
        load_pair(project / "checkpoint", model=project / "flax", project_root=tmp_path)


def test_a_traced_language_model_holds_on_every_level(llama, tmp_path):
    model = llama(architectures=["LlamaForCausalLM"])
    model.save_pretrained(tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", to=tmp_path / "flax", via="trace")
    report = check_parity(tmp_path / "checkpoint", tmp_path / "flax", continued_tokens=4)
    assert report.passed, report.failures
    assert (report.road, report.name, report.kind) == ("trace", "traced", "causal-lm")
    assert [block.torch_name for block in report.blocks] == ["model.layers.0", "model.layers.1"]
    assert report.greedy_match == 1.0
