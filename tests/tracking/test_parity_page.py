"""The page of a parity check: verdict, what does not hold, every block beside its limit; whole and without scripts."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from converters.parity_report import (
    BlockAgreement,
    ContinuedPrompt,
    OutputAgreement,
    ParityLimits,
    ParityReport,
    TensorAgreement,
)
from pipeline.tracking.parity_page import MAX_SHOWN_TENSORS, render_parity


def block(name, error):
    return BlockAgreement(
        name=name, torch_name=f"model.{name}", shape=(3, 40, 48), max_relative=error, mean_relative=error / 3
    )


@pytest.fixture
def report():
    return ParityReport(
        source="/models/<img src=x>",
        model="/models/flax",
        name="llama",
        kind="causal-lm",
        road="family",
        inputs={"input_ids": "int32 [3, 40]"},
        limits=ParityLimits(),
        tensors=TensorAgreement(num_tensors=20, num_identical=20, rounded=(), differing=()),
        blocks=tuple(block(f"layers.{index}", 4e-7) for index in range(12)),
        outputs=(
            OutputAgreement(
                name="logits",
                shape=(3, 40, 101),
                max_abs=5e-6,
                max_relative=1e-6,
                mean_kl=1e-13,
                max_kl=1e-12,
                top1_agreement=1.0,
                topk_overlap=1.0,
            ),
        ),
        not_compared=(),
        continuations=(ContinuedPrompt(reference=(5, 6), candidate=(5, 6), matched=2),),
    )


class Words(HTMLParser):
    """Text of a page, and what it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.loads = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]
        if tag in ("script", "img", "iframe"):
            self.loads.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def words(report):
    page = Words(render_parity(report))
    assert page.loads == [], "the page is whole and loads nothing"
    return " ".join(" ".join(page.text).split())


def test_a_passed_check_shows_every_number_beside_its_limit(report):
    text = words(report)
    assert "Parity of llama passed" in text
    assert "What does not hold" not in text
    assert "20 of 20" in text
    assert "largest relative error of 12 blocks 4e-7 limit 1e-5" in text
    assert "largest relative error of logits 1e-6 limit 1e-4" in text
    assert text.count("holds") == 13
    assert "block, from layers.0 to layers.11" in text
    assert "/models/<img src=x>" in text


def test_a_failed_check_says_first_what_does_not_hold(report):
    blocks = (*report.blocks[:5], block("layers.5", 3e-2), *report.blocks[6:])
    tensors = TensorAgreement(num_tensors=20, num_identical=19, rounded=(), differing=("model.q.weight",))
    text = words(replace(report, blocks=blocks, tensors=tensors))
    assert "Parity of llama failed" in text
    assert text.index("What does not hold") < text.index("layers.5 (torch: model.layers.5)") < text.index("Blocks")
    assert text.count("fails") == 1
    assert "model.q.weight differs" in text


def test_an_output_whose_distribution_is_off_fails(report):
    text = words(replace(report, outputs=(replace(report.outputs[0], max_kl=0.25),)))
    assert "KL of logits is 2.50e-01 nats > 1e-06" in text
    assert text.count("fails") == 1


def test_levels_that_a_model_does_not_have_are_left_out(report):
    hidden = OutputAgreement(name="last_hidden_state", shape=(3, 40, 8), max_abs=1e-6, max_relative=1e-6)
    text = words(replace(report, blocks=(), outputs=(hidden,), continuations=()))
    assert "This model names no blocks that both sides have." in text
    assert "Continuations" not in text
    assert "greedy match" not in text


def test_many_tensors_are_cut_and_counted(report):
    names = tuple(f"w{index}" for index in range(MAX_SHOWN_TENSORS + 7))
    tensors = TensorAgreement(num_tensors=99, num_identical=99 - len(names), rounded=names, differing=())
    text = words(replace(report, tensors=tensors))
    assert "and 7 more, in parity.json" in text
    assert "57 rounded by a cast" in text
