"""A model's own tokenizer for a text dataset."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.data.document import Document
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import Split
from pipeline.data.text_tokenizer import read_tokenizer, trained_tokenizer
from pipeline.errors import ParameterError

TEXTS = tuple(Document(name=f"{number}", text=f"a text of its own, number {number}, " * 4) for number in range(12))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory: a tokenizer whose special tokens are named otherwise than ours."""
    directory = tmp_path / "model"
    directory.mkdir()
    content = trained_tokenizer(TEXTS, vocabulary_size=300).content.decode()
    (directory / "tokenizer.json").write_text(content.replace("<|endoftext|>", "<stop>").replace("<|pad|>", "<other>"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    return directory


def test_documents_are_encoded_with_it_and_end_where_its_model_ends(model: Path, tmp_path: Path) -> None:
    given = read_tokenizer(model)
    (tmp_path / "rows").mkdir()
    plan = PackingPlan(vocabulary_size=4096, sequence_length=16, shard_tokens=10_000, seed=0)
    write_dataset(
        Split(train=TEXTS[2:], validation=TEXTS[:2]), tmp_path / "rows", plan=plan, source={}, tokenizer=given
    )
    dataset = PackedDataset.open(tmp_path / "rows")
    theirs = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert dataset.tokenizer_path.read_bytes() == (model / "tokenizer.json").read_bytes()
    assert dataset.eos_token_id == theirs.token_to_id("<stop>")
    assert dataset.vocabulary_size == theirs.get_vocab_size()
    expected = [*theirs.encode(TEXTS[0].text).ids, dataset.eos_token_id, *theirs.encode(TEXTS[1].text).ids]
    assert dataset.rows("validation", np.array([0]))[0].tolist() == expected[:17]


def test_the_end_of_a_text_is_what_the_files_say_else_a_known_name_else_an_error(model: Path) -> None:
    by_name = read_tokenizer(model).eos_token_id
    (model / "tokenizer_config.json").unlink()
    (model / "config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert read_tokenizer(model / "tokenizer.json").eos_token_id == 7
    (model / "config.json").unlink()
    with pytest.raises(ParameterError, match=r"nothing says which token ends a text.*'<stop>', '<other>'"):
        read_tokenizer(model)
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace("<stop>", "</s>"))
    assert read_tokenizer(model).eos_token_id == by_name


def test_what_is_no_tokenizer_is_refused_with_what_was_found(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").rename(model / "vocab.json")
    with pytest.raises(ParameterError, match=r"holds \['tokenizer_config.json', 'vocab.json'\]"):
        read_tokenizer(model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ParameterError, match=r"not a tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.json")
