"""`evaluate.loss` judges the Flax artifact alone, in batches that change nothing."""

import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.conversion import convert
from converters.torch_model import load_torch_model
from pipeline.data.array_sources import read_arrays
from pipeline.data.array_writing import ArrayPlan, write_arrays
from pipeline.data.arrays import ArrayDataset
from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError
from pipeline.models.module_file import InputSpec, ModuleFile
from pipeline.stages.evaluate_loss import run
from pipeline.stages.parameters import EvaluateLossParameters
from pipeline.stages.registry import KINDS

# Two frameworks' float32 losses averaged over a few hundred tokens; seen 1e-6.
TOLERANCE = 1e-4
REFERENCES = {"model": "${stages.flax.outputs.model}", "dataset": "${stages.data.outputs.dataset}"}


@pytest.fixture
def evaluated(stage_context, tiny_checkpoint, tiny_dataset, tmp_path):
    def make(**given):
        if not (tmp_path / "model").exists():
            convert(tiny_checkpoint, to=tmp_path / "model")
        parameters = EvaluateLossParameters(**REFERENCES, **given)
        context = stage_context(parameters, {"model": tmp_path / "model", "dataset": tiny_dataset})
        return run(context), context

    return make


def test_loss_is_torchs_loss_on_the_same_rows(evaluated, tiny_checkpoint, tiny_dataset):
    result, context = evaluated(num_sequences=7, batch_sequences=3)
    assert set(result.metrics) == {"validation_loss", "perplexity", "num_tokens"}
    assert set(result.metrics) < set(KINDS["evaluate.loss"].default_metrics)
    report = json.loads((context.output_root / "report" / "loss.json").read_text())
    rows = np.array([row["row"] for row in report["rows"]])
    ids = torch.from_numpy(PackedDataset.open(tiny_dataset).rows("validation", rows)).long()
    with torch.no_grad():
        logits = load_torch_model(tiny_checkpoint)(ids[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert result.metrics["validation_loss"] == pytest.approx(float(expected), abs=TOLERANCE)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["validation_loss"]))
    assert result.metrics["num_tokens"] == 7 * 32
    assert result.facts["device"] == "cpu"
    assert result.facts["device_reason"]


def test_batches_change_nothing_and_progress_is_told(evaluated):
    small, _ = evaluated(num_sequences=5, batch_sequences=2)
    large, context = evaluated(num_sequences=5, batch_sequences=64)
    assert small.metrics["validation_loss"] == pytest.approx(large.metrics["validation_loss"], abs=TOLERANCE)
    reports = context.reporter.drain()
    progress = [report.payload for report in reports if report.kind == "progress"]
    assert (progress[-1]["done"], progress[-1]["total"], progress[-1]["unit"]) == (5.0, 5.0, "rows")
    assert [report.payload["name"] for report in reports if report.kind == "figure"] == ["loss_by_position"]


def test_more_rows_than_there_are_is_all_of_them(evaluated, tiny_dataset):
    result, _ = evaluated(num_sequences=100_000)
    num_rows = PackedDataset.open(tiny_dataset).num_rows("validation")
    assert result.metrics["num_tokens"] == num_rows * 32


def test_dataset_of_another_tokenizer_is_refused(evaluated, tmp_path):
    evaluated(num_sequences=1)
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {"other": 0}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ParameterError, match="packed with another tokenizer"):
        evaluated(num_sequences=1)


@pytest.fixture
def digits(stage_context, tmp_path):
    """A dataset of digits, and a small traced network of the user's own."""
    directory = tmp_path / "digits"
    directory.mkdir()
    plan = ArrayPlan(target="labels", validation_fraction=0.1, max_examples=300, shard_examples=100, seed=0)
    arrays = read_arrays("builtin:digits", arguments={}, project_root=tmp_path)
    write_arrays(arrays, directory, plan=plan, source={})
    (tmp_path / "own_digits.py").write_text(
        "from torch import nn\n\n\n"
        "class Network(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)]\n"
        "        self.layers = nn.Sequential(*layers)\n\n"
        "    def forward(self, pixels):\n"
        "        return self.layers(pixels)\n"
    )
    sys.path.insert(0, str(tmp_path))
    torch.manual_seed(0)
    module = importlib.import_module("own_digits").Network()
    module(torch.rand(40, 1, 8, 8))  # running statistics that are not those of the start
    checkpoint = tmp_path / "own"
    checkpoint.mkdir()
    dcp.save({"model": module.state_dict()}, checkpoint_id=checkpoint / "dcp", no_dist=True)
    spec = InputSpec(shape=("batch", 1, 8, 8), dtype="float32")
    ModuleFile(factory="own_digits:Network", inputs={"pixels": spec}).write(checkpoint)
    convert(checkpoint, to=tmp_path / "own-model")
    yield module.eval(), directory, tmp_path / "own-model"
    sys.path.remove(str(tmp_path))
    sys.modules.pop("own_digits")


def test_arrays_are_judged_by_loss_and_accuracy_as_torch_would(stage_context, digits) -> None:
    module, dataset, model = digits
    parameters = EvaluateLossParameters(**REFERENCES, num_sequences=1000, batch_sequences=7)
    context = stage_context(parameters, {"model": model, "dataset": dataset})
    result = run(context)
    opened = ArrayDataset.open(dataset)
    rows = opened.rows("validation", np.arange(opened.num_rows("validation")))
    with torch.no_grad():
        logits = module(torch.from_numpy(rows["pixels"]))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(rows["labels"]))
    assert result.metrics["num_examples"] == 30
    assert result.metrics["validation_loss"] == pytest.approx(float(loss), abs=TOLERANCE)
    right = (logits.argmax(1).numpy() == rows["labels"]).mean()
    assert result.metrics["validation_accuracy"] == pytest.approx(right)
    reports = context.reporter.drain()
    assert [report.payload["name"] for report in reports if report.kind == "figure"] == ["accuracy_by_class"]
    listed = json.loads((context.output_root / "report" / "loss.json").read_text())["rows"]
    assert sum(row["loss"] for row in listed) / 30 == pytest.approx(float(loss), abs=TOLERANCE)


def test_arrays_that_are_not_the_models_inputs_are_refused(stage_context, digits, tmp_path) -> None:
    _, _, model = digits
    other = tmp_path / "other"
    other.mkdir()
    plan = ArrayPlan(target="labels", validation_fraction=0.5, max_examples=None, shard_examples=10, seed=0)
    write_arrays({"image": np.ones((8, 1, 8, 8)), "labels": np.arange(8)}, other, plan=plan, source={})
    context = stage_context(EvaluateLossParameters(**REFERENCES), {"model": model, "dataset": other})
    with pytest.raises(ParameterError, match="the model takes pixels; the dataset has image"):
        run(context)
