"""Packing and reading back: every token a target once, and damage named by file."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.data.document import Document
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, pack, write_dataset
from pipeline.data.split import Split
from pipeline.errors import ArtifactError, ParameterError

PLAN = PackingPlan(vocabulary_size=300, sequence_length=16, shard_tokens=160, seed=3)


def text(number: int) -> str:
    return f"def function_{number}(value):\n    return value + {number}\n" * 4


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    directory = tmp_path / "dataset"
    directory.mkdir()
    parts = Split(
        train=[Document(name=f"{n}", text=text(n)) for n in range(10)],
        validation=[Document(name=f"v{n}", text=text(100 + n)) for n in range(2)],
    )
    write_dataset(parts, directory, plan=PLAN, source={"source": "test"})
    return directory


def test_rows_overlap_by_one_so_every_token_is_a_target_once() -> None:
    rows = pack(np.arange(33, dtype=np.uint16), sequence_length=8, split="train")
    assert rows.shape == (4, 9)
    assert rows[:, 1:].ravel().tolist() == list(range(1, 33))
    assert rows[:, :-1].ravel().tolist() == list(range(32))


def test_the_text_comes_back_from_the_rows(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    rows = packed.rows("train", np.arange(packed.num_rows("train")))
    stream = [int(rows[0, 0]), *rows[:, 1:].ravel().tolist()]
    tokenizer = Tokenizer.from_file(str(packed.tokenizer_path))
    first_document = stream[: stream.index(packed.eos_token_id)]
    assert tokenizer.decode(first_document) == text(0)
    assert rows.dtype == np.int32
    assert rows.max() < packed.vocabulary_size


def test_shards_are_cut_at_the_asked_size_and_read_as_one(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    shards = packed.manifest.splits["train"].shards
    assert len(shards) > 1
    assert [shard.num_rows for shard in shards[:-1]] == [10] * (len(shards) - 1)
    rows = packed.rows("train", np.array([11, 0, 9, 10]))
    assert np.array_equal(rows[2], packed.rows("train", np.array([9]))[0])
    assert rows[0, 0] == rows[3, -1]  # row 11 begins with the token that ends row 10, in another shard than row 9


def test_a_row_outside_is_refused(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    with pytest.raises(IndexError, match="rows of 'validation' are 0 to"):
        packed.rows("validation", np.array([packed.num_rows("validation")]))


def test_ranks_read_disjoint_rows_of_the_step(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    whole = packed.train_rows(2, rows_per_step=4, rank=0, world_size=1, seed=0)
    parts = [packed.train_rows(2, rows_per_step=4, rank=rank, world_size=2, seed=0) for rank in range(2)]
    assert np.array_equal(whole[0::2], parts[0])
    assert np.array_equal(whole[1::2], parts[1])


def test_positions_restart_where_a_document_begins_and_nowhere_else(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    tokenizer = Tokenizer.from_file(str(packed.tokenizer_path))
    lengths = [len(tokenizer.encode(text(number)).ids) + 1 for number in range(10)]
    in_document = np.concatenate([np.arange(length) for length in lengths])
    chosen = np.arange(packed.num_rows("train"))
    positions, rows = packed.positions("train", chosen), packed.rows("train", chosen)
    begins = 0
    for number, row in enumerate(positions):
        first = number * packed.sequence_length
        expected = in_document[first : first + packed.sequence_length + 1]
        # A row that begins inside a document counts from its own first token.
        cut = np.flatnonzero(expected[1:] == 0) + 1
        expected = expected - np.where(np.arange(len(row)) < (cut[0] if len(cut) else len(row)), expected[0], 0)
        assert row.tolist() == expected.tolist()
        assert all(rows[number, place - 1] == packed.eos_token_id for place in cut)
        begins += len(cut)
    assert begins >= 9


def test_ranks_get_the_positions_of_their_rows(dataset: Path) -> None:
    packed = PackedDataset.open(dataset)
    asked = {"rows_per_step": 4, "rank": 1, "world_size": 2, "seed": 3}
    rows = packed.rows("train", np.arange(packed.num_rows("train")))
    given, positions = packed.train_rows(5, **asked), packed.train_positions(5, **asked)
    for row, places in zip(given, positions, strict=True):
        same = np.flatnonzero((rows == row).all(axis=1))
        assert any(np.array_equal(packed.positions("train", same[[n]])[0], places) for n in range(len(same)))


def test_writing_again_gives_the_same_bytes(dataset: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    parts = Split(
        train=[Document(name=f"{n}", text=text(n)) for n in range(10)],
        validation=[Document(name=f"v{n}", text=text(100 + n)) for n in range(2)],
    )
    write_dataset(parts, again, plan=PLAN, source={"source": "test"})
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in dataset.iterdir()}


def test_a_split_shorter_than_a_row_is_refused_with_the_numbers() -> None:
    with pytest.raises(ParameterError, match="the validation split has 5 tokens, fewer than one row"):
        pack(np.arange(5), sequence_length=8, split="validation")


def test_a_truncated_shard_is_named(dataset: Path) -> None:
    shard = dataset / "train-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match=r"train-00001\.npy: \d+ bytes, the manifest says"):
        PackedDataset.open(dataset)


@pytest.mark.parametrize("name", ["validation-00000.npy", "train-00000.documents.npy", "tokenizer.json"])
def test_an_altered_file_of_the_same_size_is_named(dataset: Path, name: str) -> None:
    content = bytearray((dataset / name).read_bytes())
    content[-3] ^= 1
    (dataset / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name}: altered"):
        PackedDataset.open(dataset)


@pytest.mark.parametrize("name", ["train-00000.npy", "tokenizer.json", "manifest.json"])
def test_a_missing_file_is_named(dataset: Path, name: str) -> None:
    (dataset / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        PackedDataset.open(dataset)


@pytest.mark.parametrize(
    "damage", ["{not json", "[]", '{"schema": 99}', '{"schema": 1}', '{"schema": 2, "splits": {}}']
)
def test_a_damaged_manifest_is_an_artifact_error(dataset: Path, damage: str) -> None:
    (dataset / "manifest.json").write_text(damage)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        PackedDataset.open(dataset)


def test_the_manifest_counts_what_is_there(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    assert train["num_rows"] == sum(shard["num_rows"] for shard in train["shards"])
    assert train["num_documents"] == 10
    assert train["num_bytes"] == sum(len(text(n)) for n in range(10))
    assert manifest["dtype"] == "uint16"
    assert (manifest["eos_token_id"], manifest["pad_token_id"]) == (0, 1)
