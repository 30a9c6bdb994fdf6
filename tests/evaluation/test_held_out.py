"""Rows are spread and repeatable; a dataset in another language is refused."""

import json

import pytest

from pipeline.errors import ParameterError
from pipeline.evaluation.held_out import check_language, spread_rows


@pytest.mark.parametrize(
    ("num_rows", "count", "rows"),
    [(10, 3, [0, 4, 9]), (5, 5, [0, 1, 2, 3, 4]), (3, 8, [0, 1, 2]), (7, 1, [0])],
)
def test_rows_are_spread_over_the_split(num_rows, count, rows):
    assert spread_rows(num_rows, count=count).tolist() == rows


def test_rows_are_distinct():
    for num_rows in range(1, 40):
        for count in range(1, num_rows + 1):
            assert len(spread_rows(num_rows, count=count)) == count


def test_empty_split_is_refused():
    with pytest.raises(ParameterError, match="no rows"):
        spread_rows(0, count=4)


def tokenizer(path, vocabulary):
    path.write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return path


def test_other_vocabularies_are_refused(tmp_path):
    mine, same, other = (
        tokenizer(tmp_path / name, vocabulary)
        for name, vocabulary in (("a", {"x": 0}), ("b", {"x": 0}), ("c", {"y": 0}))
    )
    sizes = {"dataset_vocabulary": 1, "model_vocabulary": 1}
    check_language(**sizes, dataset_tokenizer=mine, model_tokenizer=same)
    check_language(**sizes, dataset_tokenizer=mine, model_tokenizer=tmp_path / "absent")
    with pytest.raises(ParameterError, match="packed with another tokenizer"):
        check_language(**sizes, dataset_tokenizer=mine, model_tokenizer=other)
    with pytest.raises(ParameterError, match="token ids up to 8, the model's vocabulary ends at 3"):
        check_language(dataset_vocabulary=9, model_vocabulary=4, dataset_tokenizer=mine, model_tokenizer=same)


def test_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "t").write_text("{}")
    with pytest.raises(ParameterError, match="not a tokenizer file"):
        check_language(
            dataset_vocabulary=1, model_vocabulary=1, dataset_tokenizer=tmp_path / "t", model_tokenizer=tmp_path / "t"
        )
