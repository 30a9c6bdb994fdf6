"""`evaluate.loss` judges the Flax artifact alone, in batches that change nothing."""

import json
import math

import numpy as np
import pytest
import torch

from converters.conversion import convert
from converters.torch_model import load_torch_model
from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError
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
