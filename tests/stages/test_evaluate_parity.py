"""`evaluate.parity` passes an honest conversion and blows up on one with the right shapes and wrong values."""

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from converters.conversion import convert
from pipeline.errors import ParameterError, StageError
from pipeline.models.checkpoint import read_parameters, save_parameters
from pipeline.spec.gate import Gate
from pipeline.stages.evaluate_parity import run
from pipeline.stages.parameters import EvaluateParityParameters
from pipeline.stages.registry import KINDS

# float32 against float32 with another order of sums, logits of size 10: seen 8e-6.
HONEST = 1e-4
# Relative to the largest value of the block; seen 6e-7.
BLOCK_ERROR = 4e-6
# What the shipped flow's gate asks for.
GATES = {"max_abs_logit_difference": "<= 1e-3", "greedy_match": ">= 100%"}


@pytest.fixture
def parity(stage_context, tiny_checkpoint, tiny_dataset, tmp_path):
    """`parity(corrupt)`: convert, change the leaves by `corrupt(path, leaf)`, run the stage."""

    def make(corrupt=None, *, text=True, **given):
        model = tmp_path / "model"
        convert(tiny_checkpoint, to=model)
        if corrupt is not None:
            leaves = read_parameters(model / "params")
            (model / "params").rename(tmp_path / "honest")
            save_parameters(model / "params", {path: corrupt(path, leaf) for path, leaf in leaves.items()})
        inputs = {"checkpoint": tiny_checkpoint, "model": model, **({"dataset": tiny_dataset} if text else {})}
        references = {name: f"${{stages.{name}.outputs.x}}" for name in inputs}
        sizes = {"num_sequences": 5, "num_prompts": 2, "prompt_tokens": 6, "continuation_tokens": 8}
        parameters = EvaluateParityParameters(**references, **{**sizes, **given})
        context = stage_context(parameters, inputs)
        return run(context), context

    return make


def holds(metrics):
    return {name: Gate.parse(name, condition).judge(metrics).holds for name, condition in GATES.items()}


def test_honest_conversion_passes_and_reports(parity):
    result, context = parity()
    assert set(result.metrics) == set(KINDS["evaluate.parity"].default_metrics)
    assert result.metrics["max_abs_logit_difference"] < HONEST
    assert result.metrics["max_rel_logit_difference"] < HONEST
    assert result.metrics["max_kl"] < HONEST
    assert result.metrics["top1_agreement"] == result.metrics["greedy_match"] == 1.0
    assert all(holds(result.metrics).values())
    assert result.metrics["tensors_identical"] == 1.0
    assert 0.0 < result.metrics["max_block_relative_error"] < BLOCK_ERROR
    assert result.facts["tensors_differing"] == result.facts["failures"] == []
    assert result.facts["first_block_over_limit"] is None
    assert result.facts["num_blocks"] == 4
    report = json.loads((context.output_root / "report" / "parity.json").read_text())
    assert report["metrics"] == dict(result.metrics)
    assert len(report["sequences"]) == 5
    assert len({row["row"] for row in report["sequences"]}) == 5
    assert [len(c["reference"]) for c in report["continuations"]] == [8, 8]
    assert all(c["reference"] == c["candidate"] for c in report["continuations"])
    assert len(report["max_abs_by_position"]) == 32


def test_reports_carry_the_pictures_and_the_dataset(parity):
    _, context = parity()
    reports = context.reporter.drain()
    figures = {report.payload["name"]: report.payload["chart"]["kind"] for report in reports if report.kind == "figure"}
    assert figures == {
        "logit_difference_histogram": "bars",
        "logit_scatter": "scatter",
        "difference_by_position": "lines",
        "block_relative_error": "lines",
    }
    (dataset,) = [report.payload for report in reports if report.kind == "dataset"]
    assert dataset["digest"] == "digest-dataset"
    progress = [report.payload for report in reports if report.kind == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"]


def swap_query_heads(path, leaf):
    return np.roll(leaf, 6, axis=1) if path == "layers.1.attention.q_proj.kernel" else leaf


def transpose_square_output(path, leaf):
    return np.ascontiguousarray(leaf.T) if path == "layers.0.attention.o_proj.kernel" else leaf


def interleave_keys(path, leaf):
    if path != "layers.0.attention.k_proj.kernel":
        return leaf
    order = [0, 3, 1, 4, 2, 5]
    return leaf.reshape(48, 2, 6)[:, :, order].reshape(48, 12)


def shift_norm(path, leaf):
    return leaf - 1.0 if path == "norm.scale" else leaf


@pytest.mark.parametrize(
    ("corrupt", "block"),
    [
        (swap_query_heads, "layers.1"),
        (transpose_square_output, "layers.0"),
        (interleave_keys, "layers.0"),
        (shift_norm, "norm"),
    ],
)
def test_right_shapes_with_wrong_values_fail_the_gate_and_name_the_block(parity, corrupt, block):
    result, context = parity(corrupt)
    assert result.metrics["max_abs_logit_difference"] > 100 * HONEST
    assert result.metrics["mean_kl"] > HONEST
    assert not holds(result.metrics)["max_abs_logit_difference"]
    assert len(result.facts["tensors_differing"]) == 1
    assert result.facts["first_block_over_limit"] == block
    notes = [report.payload["text"] for report in context.reporter.drain() if report.kind == "note"]
    assert any(note.startswith(f"blocks: {block} (torch: model.{block})") for note in notes)
    assert any(note.startswith("tensors: 1 of 20 do not come back bit for bit: model.") for note in notes)


def test_without_text_random_inputs_and_their_continuations_are_compared(parity):
    result, context = parity(text=False, continuation_tokens=5)
    assert set(result.metrics) == set(KINDS["evaluate.parity"].default_metrics)
    assert result.metrics["max_abs_logit_difference"] < HONEST
    assert result.metrics["greedy_match"] == 1.0
    assert result.facts["num_sequences"] == 0
    report = json.loads((context.output_root / "report" / "parity.json").read_text())
    assert report["passed"] is True
    assert [len(continued["candidate"]) for continued in report["continuations"]] == [5, 5, 5]
    figures = {entry.payload["name"] for entry in context.reporter.drain() if entry.kind == "figure"}
    assert figures == {"block_relative_error"}


def test_the_limit_of_a_block_is_the_flows(parity):
    result, _ = parity(text=False, continuation_tokens=1, block_limit=1e-9)
    assert result.facts["first_block_over_limit"] == "layers.0"
    assert len(result.facts["failures"]) == 1


def test_text_is_refused_for_a_model_that_generates_none(tmp_path, tiny_dataset, stage_context):
    torch.manual_seed(2)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "bert")
    convert(tmp_path / "bert", to=tmp_path / "model")
    inputs = {"checkpoint": tmp_path / "bert", "model": tmp_path / "model", "dataset": tiny_dataset}
    references = {name: f"${{stages.{name}.outputs.x}}" for name in inputs}
    with pytest.raises(ParameterError, match=r"this one \(bert\) is text-encoder\n.*leave dataset out"):
        run(stage_context(EvaluateParityParameters(**references), inputs))
    del inputs["dataset"], references["dataset"]
    result = run(stage_context(EvaluateParityParameters(**references), inputs))
    assert set(result.metrics) == {
        "tensors_identical",
        "max_block_relative_error",
        "max_abs_output_difference",
        "max_rel_output_difference",
    }
    assert result.metrics["max_rel_output_difference"] < BLOCK_ERROR
    assert result.facts["kind"] == "text-encoder"


def test_not_finite_weights_are_an_error_that_says_where(parity):
    def poison(path, leaf):
        return np.full_like(leaf, np.nan) if path == "norm.scale" else leaf

    with pytest.raises(StageError, match="logits of the candidate are not finite, the first at row 0, position 0"):
        parity(poison)


def test_lengths_that_do_not_fit_are_named_together(parity):
    with pytest.raises(ParameterError) as caught:
        parity(prompt_tokens=40, continuation_tokens=60)
    assert "prompt_tokens 40 exceeds the dataset's rows of 32" in str(caught.value)
    assert "exceeds the model's max_position_embeddings 64" in str(caught.value)
