"""What a parity report says: the numbers a gate names, and a sentence for what does not hold."""

import json
import math
from dataclasses import replace

import pytest

from converters.parity_report import (
    BlockAgreement,
    ContinuedPrompt,
    OutputAgreement,
    ParityLimits,
    ParityReport,
    TensorAgreement,
)


def block(name, error):
    return BlockAgreement(
        name=name, torch_name=f"model.{name}", shape=(2, 3), max_relative=error, mean_relative=error / 2
    )


def logits(**changes):
    values = {
        "name": "logits",
        "shape": (2, 5, 101),
        "max_abs": 2e-6,
        "max_relative": 1e-6,
        "mean_kl": 1e-13,
        "max_kl": 1e-12,
        "top1_agreement": 1.0,
        "topk_overlap": 1.0,
    }
    return OutputAgreement(**{**values, **changes})


@pytest.fixture
def report():
    return ParityReport(
        source="checkpoint",
        model="flax",
        name="llama",
        kind="causal-lm",
        road="family",
        inputs={"input_ids": "int32 [2, 5]"},
        limits=ParityLimits(),
        tensors=TensorAgreement(num_tensors=20, num_identical=20, rounded=(), differing=()),
        blocks=(block("layers.0", 3e-7), block("layers.1", 9e-7)),
        outputs=(logits(),),
        not_compared=(),
        continuations=(ContinuedPrompt(reference=(1, 2, 3, 4), candidate=(1, 2, 3, 4), matched=4),),
    )


def test_a_report_that_holds_has_nothing_to_say(report):
    assert report.passed
    assert report.failures == ()
    assert report.first_block_over_limit is None
    assert report.metrics == {
        "tensors_identical": 1.0,
        "max_block_relative_error": 9e-7,
        "max_abs_output_difference": 2e-6,
        "max_rel_output_difference": 1e-6,
        "max_abs_logit_difference": 2e-6,
        "max_rel_logit_difference": 1e-6,
        "mean_kl": 1e-13,
        "max_kl": 1e-12,
        "top1_agreement": 1.0,
        "topk_overlap": 1.0,
        "greedy_match": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"tensors": TensorAgreement(num_tensors=20, num_identical=18, rounded=(), differing=("a.weight", "b"))},
            "tensors: 2 of 20 do not come back bit for bit: a.weight, b",
        ),
        (
            {"blocks": (block("layers.0", 3e-7), block("layers.1", 2e-3), block("norm", 5e-3))},
            "blocks: layers.1 (torch: model.layers.1) is the first whose relative error passes the limit: "
            "2.00e-03 > 1e-05; 2 of 3 do",
        ),
        (
            {"blocks": (block("layers.0", math.nan),)},
            "blocks: layers.0 (torch: model.layers.0) is the first whose relative error passes the limit: "
            "nan > 1e-05; 1 of 1 do",
        ),
        (
            {"outputs": (logits(max_relative=0.5, max_abs=3.0),)},
            "outputs: logits differs by 3.00e+00, relative 5.00e-01 > 1e-04",
        ),
        ({"outputs": (logits(max_kl=0.25),)}, "outputs: KL of logits is 2.50e-01 nats > 1e-06"),
        (
            {"continuations": (ContinuedPrompt(reference=(1, 2, 3, 4), candidate=(1, 9, 3, 4), matched=1),)},
            "continuations: 25.0% of tokens agree < 100%",
        ),
        ({"outputs": ()}, "outputs: there are none to compare"),
        (
            {"tensors": TensorAgreement(num_tensors=0, num_identical=0, rounded=(), differing=())},
            "tensors: there are none to compare",
        ),
    ],
)
def test_what_does_not_hold_is_a_sentence(report, change, sentence):
    failed = replace(report, **change)
    assert failed.failures == (sentence,)
    assert not failed.passed


def test_rounding_by_a_declared_cast_is_no_failure(report):
    rounded = replace(
        report, tensors=TensorAgreement(num_tensors=20, num_identical=5, rounded=("w",) * 15, differing=())
    )
    assert rounded.passed
    assert rounded.metrics["tensors_identical"] == 0.25


def test_a_model_without_logits_has_no_metrics_of_logits(report):
    plain = replace(
        report,
        outputs=(OutputAgreement(name="last_hidden_state", shape=(2, 5, 8), max_abs=1e-6, max_relative=1e-6),),
        continuations=(),
    )
    assert set(plain.metrics) == {
        "tensors_identical",
        "max_block_relative_error",
        "max_abs_output_difference",
        "max_rel_output_difference",
    }


def test_json_holds_everything_and_says_what_no_number_says(report, tmp_path):
    broken = replace(report, blocks=(block("layers.0", math.inf), block("layers.1", math.nan)))
    value = json.loads(broken.write(tmp_path).read_text())
    assert value["passed"] is False
    assert value["first_block_over_limit"] == "layers.0"
    assert [entry["max_relative"] for entry in value["blocks"]] == ["inf", "nan"]
    assert value["metrics"]["greedy_match"] == 1.0
    assert value["limits"]["block_relative_error"] == 1e-5
    assert value["outputs"][0]["name"] == "logits"


def test_the_chart_has_each_block_and_the_limit_on_a_log_scale(report):
    exact = replace(report, blocks=(block("embed", 0.0), *report.blocks))
    chart = exact.charts()["block_relative_error"]
    assert chart["y_scale"] == "log"
    by_name = {series["name"]: series for series in chart["series"]}
    assert by_name["largest"]["x"] == ["embed", "layers.0", "layers.1"]
    assert by_name["largest"]["y"][1:] == [3e-7, 9e-7]
    assert 0 < by_name["largest"]["y"][0] < 1e-8
    assert by_name["limit"]["y"] == [1e-5] * 3
    assert replace(report, blocks=()).charts() == {}
