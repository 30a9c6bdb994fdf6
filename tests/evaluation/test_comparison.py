"""What is asked of two models and how the answers are summed up, with models of numpy."""

import json

import numpy as np
import pytest

from pipeline.evaluation.comparison import charts, compare, rows_per_batch

VOCABULARY = 7


class TableModel:
    """Next-token logits from a table of the last token; a real, if small, language model."""

    def __init__(self, table):
        self.table_VV = table.astype(np.float32)

    def logits(self, tokens):
        return self.table_VV[tokens]

    def continue_greedily(self, prompts, *, num_tokens):
        last_B, chosen = prompts[:, -1], []
        for _ in range(num_tokens):
            last_B = self.table_VV[last_B].argmax(axis=-1)
            chosen.append(last_B)
        return np.stack(chosen, axis=1).astype(np.int32)


@pytest.fixture
def table():
    return np.random.default_rng(3).normal(size=(VOCABULARY, VOCABULARY))


TOKENS = np.random.default_rng(4).integers(0, VOCABULARY, size=(5, 6)).astype(np.int32)


def run(reference, candidate, **given):
    arguments = {"rows_per_batch": 2, "num_tokens": 4, "rows": np.array([0, 3, 6, 9, 12]), **given}
    return compare(reference, candidate, tokens_BT=TOKENS, prompts_BP=TOKENS[:3, :2], **arguments)


def test_equal_models_pass_every_metric(table):
    assert run(TableModel(table), TableModel(table)).metrics == {
        "max_abs_logit_difference": 0.0,
        "max_rel_logit_difference": 0.0,
        "mean_kl": 0.0,
        "max_kl": 0.0,
        "top1_agreement": 1.0,
        "greedy_match": 1.0,
    }


def test_one_wrong_logit_is_seen_where_it_is(table):
    wrong = table.copy()
    token = int(TOKENS[3, 2])
    wrong[token, 1] += 0.5
    found = run(TableModel(table), TableModel(wrong))
    assert found.metrics["max_abs_logit_difference"] == pytest.approx(0.5, abs=1e-6)
    touched = {row for row, tokens in zip((0, 3, 6, 9, 12), TOKENS, strict=True) if token in tokens}
    assert {sequence.row for sequence in found.sequences if sequence.max_abs > 0} == touched
    positions = {int(position) for position in np.argwhere(token == TOKENS)[:, 1]}
    assert {i for i, value in enumerate(found.max_abs_by_position) if value > 0} == positions


def test_batch_size_changes_nothing(table):
    wrong = table + np.random.default_rng(5).normal(size=table.shape) * 0.01
    one, three = (run(TableModel(table), TableModel(wrong), rows_per_batch=size) for size in (1, 3))
    assert one.metrics == three.metrics
    assert one.histogram == three.histogram
    assert sum(one.histogram) == TOKENS.size * VOCABULARY


def test_broken_greedy_continuation_is_counted_to_the_first_difference(table):
    found = run(TableModel(table), TableModel(-table))
    assert found.metrics["greedy_match"] == 0.0
    assert found.metrics["top1_agreement"] == 0.0
    assert [len(continuation.prompt) for continuation in found.continuations] == [2, 2, 2]
    assert found.continuations[0].reference != found.continuations[0].candidate


def test_progress_reaches_its_total(table):
    told = []
    run(TableModel(table), TableModel(table), progress=lambda done, total, note: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_charts_are_plain_json_of_the_declared_form(table):
    made = charts(run(TableModel(table), TableModel(table + 0.01)), reference="torch", candidate="Flax")
    assert {name: chart["kind"] for name, chart in made.items()} == {
        "logit_difference_histogram": "bars",
        "logit_scatter": "scatter",
        "difference_by_position": "lines",
    }
    assert made["logit_difference_histogram"]["x_scale"] == "log"
    for chart in made.values():
        json.dumps(chart, allow_nan=False)
        assert all(len(series["x"]) == len(series["y"]) > 0 for series in chart["series"])
        assert set(chart) == {"title", "kind", "x_label", "y_label", "x_scale", "y_scale", "series"}
    assert min(made["logit_difference_histogram"]["series"][0]["x"]) > 0


def test_batches_fit_their_budget():
    assert rows_per_batch(256, vocabulary=4096) == 16
    assert rows_per_batch(8192, vocabulary=150_000) == 1
