"""Of several ranks' errors, the cause is shown first."""

import pickle
from pathlib import Path

from pipeline.artifacts.store import open_store
from pipeline.errors import CheckpointError, PreemptedError, StageError
from pipeline.training.failure import (
    LostContactError,
    RankFailure,
    StalledError,
    WaitingError,
    first_failure,
    is_consequence,
    read_failures,
    record_failure,
)


def failure(rank: int, error, at: float) -> RankFailure:
    return RankFailure(rank=rank, error=error, at=at)


def test_a_cause_comes_before_what_follows_from_it_whenever_it_was_heard() -> None:
    shown = first_failure(
        [
            failure(0, LostContactError("rank 0 lost contact"), 1.0),
            failure(2, WaitingError("rank 2, step 3, waiting for the other ranks\nstacks"), 2.0),
            failure(1, StageError("rank 1: ValueError: a bug", hint="mend it"), 3.0),
        ]
    )
    assert isinstance(shown, StageError)
    assert shown.message.splitlines() == [
        "rank 1: ValueError: a bug",
        "after that:",
        "  rank 0: LostContactError: rank 0 lost contact",
        "  rank 2: WaitingError: rank 2, step 3, waiting for the other ranks",
    ]
    assert shown.hint == "mend it"
    assert type(pickle.loads(pickle.dumps(shown))) is StageError


def test_of_two_causes_the_earlier_one_is_shown_and_the_same_words_only_once() -> None:
    both = [failure(0, CheckpointError("disk full"), 5.0), failure(1, StalledError("rank 1, waiting for data"), 4.0)]
    assert first_failure(both).message.startswith("rank 1, waiting for data\nafter that:\n  rank 0: CheckpointError")
    same = [failure(rank, PreemptedError("make way"), float(rank)) for rank in (0, 1)]
    assert first_failure(same).message == "make way"
    assert not is_consequence(same[0].error)
    lost = [failure(1, LostContactError("rank 1 lost contact"), 1.0), failure(0, WaitingError("rank 0, storage"), 2.0)]
    assert first_failure(lost).message.startswith("rank 0, storage")


def test_a_rank_that_cannot_be_heard_leaves_a_note_for_its_executor(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    noted = [
        failure(0, LostContactError("rank 0 lost contact"), 3.0),
        failure(1, StalledError("rank 1, step 5, waiting for data", hint="raise the limit"), 2.0),
    ]
    record_failure(store, "launch", start="0001", failure=failure(1, StageError("of an earlier start"), 1.0))
    for item in noted:
        record_failure(store, "launch", start="0002", failure=item)
    found = read_failures(store, "launch", start="0002")
    assert [(item.rank, type(item.error), item.at) for item in found] == [
        (0, LostContactError, 3.0),
        (1, StalledError, 2.0),
    ]
    assert first_failure(found).hint == "raise the limit"
    assert read_failures(store, "launch", start="0003") == []  # its ranks were killed: older notes are not the cause
    assert read_failures(store, "another", start="0002") == []
