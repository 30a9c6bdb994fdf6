"""The seeded order and the split by document."""

import pytest

from pipeline.data.document import Document
from pipeline.data.split import choose, split
from pipeline.errors import ParameterError


def documents(count: int) -> list[Document]:
    return [Document(name=f"{number}.txt", text="x" * 100) for number in range(count)]


def test_the_order_depends_on_names_and_seed_alone() -> None:
    some = documents(50)
    first = choose(some, seed=0, max_documents=None, max_bytes=None)
    assert choose(reversed(some), seed=0, max_documents=None, max_bytes=None) == first
    assert choose(some, seed=1, max_documents=None, max_bytes=None) != first
    assert {item.name for item in first} == {item.name for item in some}


def test_limits_keep_the_beginning_of_the_order_and_at_least_two() -> None:
    some = documents(50)
    everything = choose(some, seed=0, max_documents=None, max_bytes=None)
    assert choose(some, seed=0, max_documents=7, max_bytes=None) == everything[:7]
    assert choose(some, seed=0, max_documents=None, max_bytes=1050) == everything[:10]
    assert choose(some, seed=0, max_documents=None, max_bytes=1) == everything[:2]


def test_about_the_asked_fraction_is_held_out() -> None:
    parts = split(documents(2000), seed=0, validation_fraction=0.05)
    assert len(parts.train) + len(parts.validation) == 2000
    assert 70 <= len(parts.validation) <= 130  # binomial(2000, 0.05): mean 100, three deviations are 29


def test_new_documents_move_no_other_between_the_splits() -> None:
    before = {item.name for item in split(documents(500), seed=0, validation_fraction=0.1).validation}
    after = {item.name for item in split(documents(900), seed=0, validation_fraction=0.1).validation}
    assert before <= after


@pytest.mark.parametrize("count", [2, 3])
def test_both_splits_have_a_document_even_of_few(count: int) -> None:
    for seed in range(20):
        parts = split(documents(count), seed=seed, validation_fraction=0.05)
        assert parts.train
        assert parts.validation


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(ParameterError, match="at least two documents, found 1"):
        split(documents(1), seed=0, validation_fraction=0.5)
