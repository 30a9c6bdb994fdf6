"""The commit protocol, over a local and a remote store: nothing counts before its commit, and no commit is lost."""

import itertools
import json
from pathlib import Path

import pytest

from pipeline.artifacts.manifest import FileEntry
from pipeline.artifacts.store import Store, open_store
from pipeline.errors import CheckpointError
from pipeline.training.checkpoints.commit import (
    AttemptKey,
    CheckpointCommit,
    claim_generation,
    commit,
    find_resumable,
    retain,
    write_vote,
)

WORLD = 2
_fresh = itertools.count()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path))
    return open_store(f"memory://commit-test-{tmp_path.name}-{next(_fresh)}")


def write_files(store: Store, key: AttemptKey, rank: int) -> tuple[FileEntry, ...]:
    data = f"state of rank {rank} at {key.step}".encode()
    store.write(f"{key.prefix}/dcp/__{rank}_0.distcp", data)
    return (FileEntry(path=f"dcp/__{rank}_0.distcp", size=len(data), sha256="unread"),)


def save(store: Store, step: int, *, generation: int = 1) -> CheckpointCommit:
    key = AttemptKey.new(step=step, generation=generation)
    for rank in range(WORLD):
        write_vote(store, key, rank=rank, files=write_files(store, key, rank))
    return commit(store, key, world_size=WORLD)


def steps(store: Store) -> list[int]:
    return [item.key.step for item in find_resumable(store).commits]


def test_generations_only_rise(store: Store) -> None:
    assert [claim_generation(store) for _ in range(3)] == [1, 2, 3]


def test_the_newest_commit_comes_first(store: Store) -> None:
    for step in (3, 12, 9):
        save(store, step)
    assert steps(store) == [12, 9, 3]
    newest = find_resumable(store).commits[0]
    assert [entry.path for entry in newest.files] == ["dcp/__0_0.distcp", "dcp/__1_0.distcp"]
    assert newest.key.prefix.startswith("checkpoints/step-00000012/0001-")


@pytest.mark.parametrize("crash_after", range(2 * WORLD))
def test_a_crash_anywhere_before_the_commit_leaves_the_older_one(store: Store, crash_after: int) -> None:
    save(store, 3)
    key = AttemptKey.new(step=6, generation=1)
    done = 0
    for rank in range(WORLD):
        for action in ("files", "vote"):
            if done == crash_after:
                break
            if action == "files":
                files = write_files(store, key, rank)
            else:
                write_vote(store, key, rank=rank, files=files)
            done += 1
    found = find_resumable(store)
    assert [item.key.step for item in found.commits] == [3]
    assert found.num_uncommitted == (1 if crash_after else 0)
    with pytest.raises(CheckpointError, match="gave no vote"):
        commit(store, key, world_size=WORLD)
    assert steps(store) == [3]


def test_a_file_shorter_than_its_vote_is_not_committed(store: Store) -> None:
    key = AttemptKey.new(step=3, generation=1)
    for rank in range(WORLD):
        write_vote(store, key, rank=rank, files=write_files(store, key, rank))
    store.write(f"{key.prefix}/dcp/__1_0.distcp", b"torn")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has 4 bytes"):
        commit(store, key, world_size=WORLD)
    assert steps(store) == []


def test_an_older_generation_cannot_commit_any_more(store: Store) -> None:
    old = claim_generation(store)
    key = AttemptKey.new(step=3, generation=old)
    for rank in range(WORLD):
        write_vote(store, key, rank=rank, files=write_files(store, key, rank))
    claim_generation(store)
    with pytest.raises(CheckpointError, match="generation 2 has started; this is 1"):
        commit(store, key, world_size=WORLD)
    assert steps(store) == []


def test_a_directory_is_committed_once(store: Store) -> None:
    made = save(store, 3)
    with pytest.raises(CheckpointError, match="was committed before"):
        commit(store, made.key, world_size=WORLD)


def test_votes_of_another_step_do_not_count(store: Store) -> None:
    key = AttemptKey.new(step=3, generation=1)
    other = AttemptKey.new(step=4, generation=1)
    write_vote(store, other, rank=0, files=())
    vote = store.read(f"{other.prefix}/vote-0.json")
    assert vote is not None
    store.write(f"{key.prefix}/vote-0.json", vote)
    with pytest.raises(CheckpointError, match="rank 0 voted for step 4 of generation 1"):
        commit(store, key, world_size=1)


@pytest.mark.parametrize("damage", ["lost", "torn", "unreadable"])
def test_a_damaged_commit_is_rejected_with_its_reason(store: Store, damage: str) -> None:
    save(store, 3)
    made = save(store, 6)
    name = f"{made.key.prefix}/dcp/__0_0.distcp"
    if damage == "lost":
        store.delete(name)
    elif damage == "torn":
        store.write(name, b"short")
    else:
        store.write(f"{made.key.prefix}/COMMIT.json", b'{"format": 1, "ke')
    found = find_resumable(store)
    assert [item.key.step for item in found.commits] == [3]
    assert len(found.rejected) == 1
    assert made.key.prefix in found.rejected[0]


def test_retention_counts_commits_only_and_keeps_the_newest(store: Store) -> None:
    for step in (3, 6, 9):
        save(store, step)
    unfinished = AttemptKey.new(step=12, generation=1)
    write_files(store, unfinished, 0)
    retain(store, keep=2, generation=1)
    assert steps(store) == [9, 6]
    assert find_resumable(store).num_uncommitted == 1  # of this generation: it may still be written
    retain(store, keep=1, generation=2)
    assert steps(store) == [9]
    assert find_resumable(store).num_uncommitted == 0


def test_retention_does_not_count_a_damaged_commit_as_kept(store: Store) -> None:
    save(store, 3)
    newest = save(store, 6)
    store.delete(f"{newest.key.prefix}/dcp/__0_0.distcp")
    retain(store, keep=1, generation=1)
    assert steps(store) == [3]


def test_a_later_start_s_commits_are_newer_than_later_steps_of_an_earlier_one(store: Store) -> None:
    save(store, 9, generation=1)  # altered, say, so the next start went on from before it
    save(store, 3, generation=2)
    assert steps(store) == [3, 9]
    retain(store, keep=1, generation=2)
    assert steps(store) == [3]


def test_a_commit_that_was_just_made_is_kept_whatever_its_step(store: Store) -> None:
    save(store, 6)
    save(store, 9)
    made = save(store, 7)
    retain(store, keep=1, generation=1, made=made.key)
    assert steps(store) == [7]


def test_a_commit_survives_its_own_json(store: Store) -> None:
    made = save(store, 3)
    assert CheckpointCommit.from_json(made.to_json(), where="here") == made
    fields = json.loads(made.to_json()) | {"format": 99}
    with pytest.raises(CheckpointError, match="another version"):
        CheckpointCommit.from_json(json.dumps(fields).encode(), where="here")
