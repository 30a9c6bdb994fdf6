"""Every crash point of the commit protocol: no commit that was acknowledged is lost, none is found that was not whole.

A store counts what changes it. A history of saves is cut before and after each of its changes, one run a cut; a second
history cuts the recovery as well; a third lets a whole other start of training happen at each point of the first.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.artifacts.manifest import FileEntry
from pipeline.errors import CheckpointError
from pipeline.training.checkpoints.commit import (
    AttemptKey,
    claim_generation,
    commit,
    find_resumable,
    retain,
    write_vote,
)

WORLD = 2
KEEP = 2
STEPS = (3, 6, 9)
CHANGES = frozenset({"write", "create", "delete", "move"})


class CrashError(Exception):
    """The process ended here."""


class DictStore:
    """The part of a store that the protocol uses, in memory; each change is atomic, as the store's contract says."""

    url = "dict://"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def read(self, key: str) -> bytes | None:
        return self.held.get(key)

    def write(self, key: str, data: bytes) -> None:
        self.held[key] = data

    def create(self, key: str, data: bytes) -> bool:
        return self.held.setdefault(key, data) is data

    def list(self, prefix: str) -> list[str]:
        return sorted(
            {key.removeprefix(f"{prefix}/").split("/")[0] for key in self.held if key.startswith(f"{prefix}/")}
        )

    def size(self, key: str) -> int | None:
        return len(self.held[key]) if key in self.held else None

    def delete(self, prefix: str) -> None:
        for key in [key for key in self.held if key == prefix or key.startswith(f"{prefix}/")]:
            del self.held[key]


class CuttingStore:
    """Passes everything on; at change number `at` (from 0) it calls `act`, before the change or after it."""

    def __init__(self, store: Any, *, at: int, is_after: bool, act: Callable[[], None]) -> None:
        self._store, self._at, self._is_after, self._act = store, at, is_after, act
        self.num_changes = 0

    def __getattr__(self, name: str) -> Any:
        passed = getattr(self._store, name)
        if name not in CHANGES:
            return passed

        def change(*given: Any) -> Any:
            number = self.num_changes
            self.num_changes += 1
            if number == self._at and not self._is_after:
                self._act()
            result = passed(*given)
            if number == self._at and self._is_after:
                self._act()
            return result

        return change


def crash() -> None:
    raise CrashError


def train(store: Any, acknowledged: list[int], *, first: int = 0) -> None:
    """One start of training: every step is saved by both ranks, committed, and old ones go."""
    generation = claim_generation(store)
    for step in STEPS:
        if step <= first:
            continue
        key = AttemptKey.new(step=step, generation=generation)
        for rank in range(WORLD):
            save_rank(store, key, rank)
        commit(store, key, world_size=WORLD)
        acknowledged.append(step)
        retain(store, keep=KEEP, generation=generation)


def save_rank(store: Any, key: AttemptKey, rank: int) -> None:
    data = f"rank {rank} at step {key.step}".encode()
    store.write(f"{key.prefix}/dcp/__{rank}_0.distcp", data)
    entry = FileEntry(path=f"dcp/__{rank}_0.distcp", size=len(data), sha256="unread")
    write_vote(store, key, rank=rank, files=(entry,))


def check(store: Any, acknowledged: list[int]) -> list[int]:
    """The invariants; returns the steps that can be resumed, newest first."""
    found = find_resumable(store)
    steps = [item.key.step for item in found.commits]
    for item in found.commits:
        held = {entry.path: store.read(f"{item.key.prefix}/{entry.path}") for entry in item.files}
        wanted = {f"dcp/__{rank}_0.distcp": f"rank {rank} at step {item.key.step}".encode() for rank in range(WORLD)}
        assert held == wanted  # a committed step always loads
    assert not found.rejected
    for step in set(acknowledged) - set(steps):  # an acknowledged commit only goes when enough newer ones are there
        assert sum(newer > step for newer in steps) >= KEEP
    return steps


def num_changes() -> int:
    counting = CuttingStore(DictStore(), at=-1, is_after=False, act=crash)
    train(counting, [])
    return counting.num_changes


CUTS = list(itertools.product(range(num_changes()), (False, True)))


@pytest.mark.parametrize(("at", "is_after"), CUTS)
def test_a_crash_anywhere_loses_nothing_and_the_next_start_ends_the_work(at: int, is_after: bool) -> None:
    store, acknowledged = DictStore(), []
    with pytest.raises(CrashError):
        train(CuttingStore(store, at=at, is_after=is_after, act=crash), acknowledged)
    steps = check(store, acknowledged)
    assert set(steps) <= set(acknowledged) | {step for step in STEPS if step > max(acknowledged, default=0)}
    again: list[int] = []
    train(store, again, first=max(steps, default=0))
    assert check(store, acknowledged + again)[:1] == [STEPS[-1]]
    if again:  # the first save takes away what the crash left behind
        assert find_resumable(store).num_uncommitted == 0


def test_a_second_crash_during_recovery_loses_nothing() -> None:
    for (first, first_after), (second, second_after) in itertools.product(CUTS, CUTS):
        store, acknowledged = DictStore(), []
        with pytest.raises(CrashError):
            train(CuttingStore(store, at=first, is_after=first_after, act=crash), acknowledged)
        resumed = max(check(store, acknowledged), default=0)
        cutting = CuttingStore(store, at=second, is_after=second_after, act=crash)
        try:
            train(cutting, acknowledged, first=resumed)
        except CrashError:
            resumed = max(check(store, acknowledged), default=0)
            train(store, acknowledged, first=resumed)
        assert check(store, acknowledged)[0] == STEPS[-1]


@pytest.mark.parametrize(("at", "is_after"), CUTS)
def test_another_start_at_any_moment_harms_no_commit_and_at_most_one_commits_from_then_on(
    at: int, is_after: bool
) -> None:
    """The older start goes on as if nothing had been: a zombie, whose partition has healed."""
    store, acknowledged = DictStore(), []
    after: list[int] = []

    def other_start() -> None:
        resumed = check(store, acknowledged)
        train(store, after, first=max(resumed, default=0))

    zombie_acknowledged = acknowledged
    try:
        train(CuttingStore(store, at=at, is_after=is_after, act=other_start), zombie_acknowledged)
    except CheckpointError as error:
        assert "has started; this is" in error.message or "is missing" in error.message
    found = find_resumable(store)
    assert found.commits[0].key.step == STEPS[-1]
    assert not found.rejected
    check(store, acknowledged + after)
    generations = {item.key.step: item.key.generation for item in reversed(found.commits)}
    assert generations[STEPS[-1]] == max(generations.values())  # who resumes takes the newest start's


@pytest.mark.parametrize(("at", "is_after"), CUTS)
def test_a_commit_that_was_decided_before_and_created_at_any_moment_of_a_later_start_is_whole_or_refused(
    at: int, is_after: bool
) -> None:
    """The window between the look at generations and files, and the creation."""
    store = DictStore()
    key = AttemptKey.new(step=STEPS[1], generation=claim_generation(store))
    for rank in range(WORLD):
        save_rank(store, key, rank)
    looked, may_create = threading.Event(), threading.Event()
    outcome: list[str] = []

    def pause() -> None:
        looked.set()
        assert may_create.wait(10)

    def decide() -> None:
        try:
            commit(CuttingStore(store, at=0, is_after=False, act=pause), key, world_size=WORLD)
            outcome.append("committed")
        except CheckpointError as error:
            outcome.append(error.message)

    zombie = threading.Thread(target=decide)
    zombie.start()
    assert looked.wait(10)

    def resume_zombie() -> None:
        may_create.set()
        zombie.join(10)

    later: list[int] = []
    train(CuttingStore(store, at=at, is_after=is_after, act=resume_zombie), later)
    zombie.join(10)
    assert check(store, later)[0] == STEPS[-1]
    if outcome == ["committed"]:  # then it was there to be resumed, until enough newer ones were
        check(store, [*later, key.step])
    else:
        assert "aborted by a later start" in outcome[0] or "is missing" in outcome[0]
