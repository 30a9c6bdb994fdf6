"""The commit protocol on storage that loses, tears, refuses and lags: no lost commit, no false commit."""

import contextlib
import itertools
from typing import Any

import pytest
from chaos_files import FULL, KINDS, LOST, PLACES, REFUSED, RESENT, TORN, UNANSWERED, Weather, register
from test_commit_crash_points import KEEP, STEPS, WORLD, CrashError, CuttingStore, check, crash, save_rank, train

from pipeline.artifacts.store import open_store
from pipeline.errors import CheckpointError, StoreError
from pipeline.training.checkpoints.commit import AttemptKey, abandon, claim_generation, commit, find_resumable, retain

_fresh = itertools.count()


@pytest.fixture(autouse=True)
def chaos(monkeypatch) -> None:
    register()
    monkeypatch.setattr("pipeline.artifacts.fsspec_store.time.sleep", lambda seconds: None)
    yield
    PLACES.clear()


def place(**weather: Any) -> tuple[Any, Weather]:
    name = f"place-{next(_fresh)}"
    PLACES[name] = Weather(**weather)
    return open_store(f"chaos://{name}"), PLACES[name]


def train_through(store: Any, acknowledged: list[int]) -> None:
    """As `train`, but what a save fails with is left behind, as a training does that has an earlier commit."""
    generation = claim_generation(store)
    for step in STEPS:
        key = AttemptKey.new(step=step, generation=generation)
        try:
            for rank in range(WORLD):
                save_rank(store, key, rank)
            commit(store, key, world_size=WORLD)
        except (CheckpointError, StoreError):
            with contextlib.suppress(StoreError):
                abandon(store, key)
            continue
        acknowledged.append(step)
        with contextlib.suppress(StoreError):
            retain(store, keep=KEEP, generation=generation)


def num_changes() -> int:
    store, weather = place()
    train_through(store, [])
    return weather.num_changes


@pytest.mark.parametrize("listing_lag", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_anywhere_costs_one_save_at_most_and_no_commit(kind: str, listing_lag: int) -> None:
    for at in range(num_changes()):
        store, _ = place(faults={at: kind}, listing_lag=listing_lag)
        acknowledged: list[int] = []
        try:
            train_through(store, acknowledged)
        except StoreError:
            assert (kind, acknowledged) == (FULL, [])  # of the generation's own mark
        steps = check(store, acknowledged)
        assert set(steps) <= set(acknowledged)
        assert steps == sorted(acknowledged, reverse=True)[: len(steps)]
        if kind in (REFUSED, UNANSWERED, RESENT):
            assert acknowledged == list(STEPS), at
        elif acknowledged:
            assert len(acknowledged) >= len(STEPS) - 1
        again: list[int] = []
        train(store, again, first=max(steps, default=0))
        assert check(store, acknowledged + again)[0] == STEPS[-1]


@pytest.mark.parametrize("listing_lag", [3, 8])
def test_a_crash_anywhere_loses_nothing_where_listings_are_old(listing_lag: int) -> None:
    for at, is_after in itertools.product(range(num_changes()), (False, True)):
        store, _ = place(listing_lag=listing_lag)
        acknowledged: list[int] = []
        with contextlib.suppress(CrashError):
            train(CuttingStore(store, at=at, is_after=is_after, act=crash), acknowledged)
        steps = check(store, acknowledged)
        assert max(steps, default=0) >= max(acknowledged, default=0)
        train(store, acknowledged, first=max(steps, default=0))
        assert check(store, acknowledged)[0] == STEPS[-1]


def test_a_failed_save_leaves_nothing_that_takes_space() -> None:
    store, weather = place(refused_names={"__1_0.distcp": 1})
    acknowledged: list[int] = []
    train_through(store, acknowledged)
    assert acknowledged == [6, 9]
    assert not any("step-00000003" in name for name in weather.held)
    assert find_resumable(store).num_uncommitted == 0


@pytest.mark.parametrize("kind", [UNANSWERED, RESENT, TORN, LOST, REFUSED])
def test_whoever_created_an_object_knows_it_whatever_the_answer_was(kind: str) -> None:
    store, weather = place(faults={0: kind})
    assert store.create("lease", b"mine, and unlike anybody else's")
    assert not store.create("lease", b"another one's")
    assert list(weather.held.values()) == [b"mine, and unlike anybody else's"]


def test_a_storage_that_creates_twice_is_refused(monkeypatch) -> None:
    store, weather = place()
    store.check_writable()
    assert weather.held == {}
    monkeypatch.setattr(
        "chaos_files.ChaosFiles.pipe_file",
        lambda self, path, value, mode="", **options: weather.held.__setitem__(self._key(path), value),
    )
    with pytest.raises(StoreError, match="an object can be created twice"):
        store.check_writable()
