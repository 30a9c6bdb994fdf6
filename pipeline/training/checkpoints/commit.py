"""The commit protocol of training checkpoints.

Owns the layout `checkpoints/step-<n>/<generation>-<attempt>/`, votes, the one `COMMIT.json`, the search for what can
be resumed, and retention. Knows nothing of torch: it sees files. The one decision: presumed abort; a directory without
`COMMIT.json` does not exist for anyone who resumes, and that file is created once: by rank 0 of the attempt, as its
commit, or by whoever clears the attempt away, as its abort. No decision rests on a listing, which may be stale: what
matters is asked for by name.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.artifacts.manifest import FileEntry
from pipeline.artifacts.store import Store
from pipeline.errors import CheckpointError, StoreError

COMMIT_NAME = "COMMIT.json"
FORMAT = 1
_CHECKPOINTS = "checkpoints"
_GENERATIONS = "generations"
_NEWEST = f"{_CHECKPOINTS}/NEWEST"
"""Prefix of the last commit; written after it, and only one more place to look at."""
_PREFIX = re.compile(rf"{_CHECKPOINTS}/step-\d+/\d+-[0-9a-f]+")
_ABORT = b'{"aborted": true}\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptKey:
    """One attempt to save one step."""

    step: int
    generation: int
    attempt_id: str

    @property
    def prefix(self) -> str:
        """Key of the directory."""
        return f"{_CHECKPOINTS}/step-{self.step:08d}/{self.generation:04d}-{self.attempt_id}"

    @classmethod
    def new(cls, *, step: int, generation: int) -> "AttemptKey":
        """A key that nobody has used."""
        return cls(step=step, generation=generation, attempt_id=secrets.token_hex(4))


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """A rank's word that its files are written and closed."""

    rank: int
    step: int
    generation: int
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommit:
    """A committed checkpoint."""

    key: AttemptKey
    world_size: int
    created_at: float
    """Seconds since the epoch."""
    files: tuple[FileEntry, ...]
    """Paths relative to the attempt's directory."""

    def to_json(self) -> bytes:
        """Stable, readable JSON."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> "CheckpointCommit":
        """Parse a commit.

        Raises:
            CheckpointError: the text is not a commit; `where` names it.
        """
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("written by another version of this program")
            return cls(
                key=AttemptKey(**fields["key"]),
                world_size=fields["world_size"],
                created_at=fields["created_at"],
                files=tuple(FileEntry(**entry) for entry in fields["files"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is not a readable commit: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumable:
    """What a search found, newest first, and what it had to leave out."""

    commits: tuple[CheckpointCommit, ...]
    rejected: tuple[str, ...]
    """Commits that cannot be used, each with its reason."""
    num_uncommitted: int


def claim_generation(store: Store) -> int:
    """Number of this start of training, one above every earlier one; older generations can no longer commit."""
    taken = [int(name) for name in store.list(_GENERATIONS) if name.isdigit()]
    generation = max(taken, default=0) + 1
    mark = f"{time.time()} {secrets.token_hex(8)}\n".encode()
    while not store.create(_generation_key(generation), mark):
        generation += 1
    return generation


def write_vote(store: Store, key: AttemptKey, *, rank: int, files: Sequence[FileEntry]) -> None:
    """Say that this rank's files are durable."""
    vote = Vote(rank=rank, step=key.step, generation=key.generation, files=tuple(files))
    store.write(_vote_key(key, rank), (json.dumps(asdict(vote), indent=1, sort_keys=True) + "\n").encode())


def commit(store: Store, key: AttemptKey, *, world_size: int) -> CheckpointCommit:
    """Collect every vote, compare it with what is in the store, and create the commit.

    Raises:
        CheckpointError: a vote is missing or does not hold, or a newer generation has started; nothing is committed.
    """
    problems: list[str] = []
    files: list[FileEntry] = []
    for rank in range(world_size):
        vote = _read_vote(store, key, rank)
        if isinstance(vote, str):
            problems.append(f"rank {rank} {vote}")
            continue
        if (vote.step, vote.generation) != (key.step, key.generation):
            problems.append(f"rank {rank} voted for step {vote.step} of generation {vote.generation}")
        files += vote.files
    problems += why_incomplete(store, key, files)
    # Numbers have no gaps, so the next one alone tells.
    if store.read(_generation_key(key.generation + 1)) is not None:
        problems.append(f"generation {key.generation + 1} has started; this is {key.generation}")
    if problems:
        raise CheckpointError(
            f"checkpoint {store.url}/{key.prefix} is not committed: " + "; ".join(problems),
            hint="the newest earlier commit stays valid and training resumes from it",
        )
    made = CheckpointCommit(key=key, world_size=world_size, created_at=time.time(), files=tuple(files))
    if not store.create(f"{key.prefix}/{COMMIT_NAME}", made.to_json()):
        raise CheckpointError(
            f"checkpoint {store.url}/{key.prefix} was committed before, or aborted by a later start of training; a "
            "directory is never reused"
        )
    # A later start may have cleared the attempt away, abort and all, since its files were looked at.
    problems = why_incomplete(store, key, files)
    if problems:
        store.delete(f"{key.prefix}/{COMMIT_NAME}")
        raise CheckpointError(f"checkpoint {store.url}/{key.prefix} is not committed: " + "; ".join(problems))
    with contextlib.suppress(StoreError):  # a listing finds it too
        store.write(_NEWEST, key.prefix.encode())
    return made


def abandon(store: Store, key: AttemptKey) -> None:
    """Clear away an attempt that came to nothing, so that what it wrote takes no space; a commit stays.

    Raises:
        StoreError: the storage refuses; a later start of training tries again.
    """
    _reap(store, key.prefix)


def why_incomplete(store: Store, key: AttemptKey, files: Sequence[FileEntry]) -> list[str]:
    """Files that are missing or have another size."""
    problems = []
    for entry in files:
        size = store.size(f"{key.prefix}/{entry.path}")
        if size is None:
            problems.append(f"{entry.path} is missing")
        elif size != entry.size:
            problems.append(f"{entry.path} has {size} bytes, not {entry.size}")
    return problems


def find_resumable(store: Store) -> Resumable:
    """Every commit whose files are there with the right sizes; by starts of training, then by steps, newest first."""
    commits: list[CheckpointCommit] = []
    rejected: list[str] = []
    num_uncommitted = 0
    for prefix in _attempt_prefixes(store):
        data = store.read(f"{prefix}/{COMMIT_NAME}")
        if data is None or data == _ABORT:
            num_uncommitted += 1
            continue
        try:
            found = CheckpointCommit.from_json(data, where=f"{store.url}/{prefix}/{COMMIT_NAME}")
        except CheckpointError as error:
            rejected.append(error.message)
            continue
        problems = why_incomplete(store, found.key, found.files)
        if found.key.prefix != prefix or problems:
            rejected.append(f"{prefix}: " + ("; ".join(problems) or "its commit names another directory"))
        else:
            commits.append(found)
    commits.sort(key=lambda item: (item.key.generation, item.key.step, item.created_at), reverse=True)
    return Resumable(commits=tuple(commits), rejected=tuple(rejected), num_uncommitted=num_uncommitted)


def retain(store: Store, *, keep: int, generation: int, made: AttemptKey | None = None) -> None:
    """Delete all but the `keep` newest usable commits, and what older generations left uncommitted.

    `made` is the newest whatever its step: after going back behind an altered commit, that one has a later step.
    A commit file goes before its directory, so a deletion cut short leaves an aborted attempt, never a damaged commit.
    """
    found = find_resumable(store)
    newest_first = sorted(found.commits, key=lambda item: item.key != made)
    for old in newest_first[keep:]:
        decision = f"{old.key.prefix}/{COMMIT_NAME}"
        store.delete(decision)
        if store.read(decision) is None:  # not believed: a commit without files would look damaged
            store.delete(old.key.prefix)
    for prefix in _attempt_prefixes(store):
        if _generation_of(prefix) < generation:
            _reap(store, prefix)


def _reap(store: Store, prefix: str) -> None:
    """Delete an attempt unless it is committed."""
    if not _is_aborted(store, prefix):
        return
    for name in store.list(prefix):
        if name != COMMIT_NAME:  # the abort goes last: until then the attempt cannot commit
            store.delete(f"{prefix}/{name}")
    store.delete(prefix)


def _is_aborted(store: Store, prefix: str) -> bool:
    """Decide an attempt that nobody has committed: its own commit can no longer be created then."""
    decision = f"{prefix}/{COMMIT_NAME}"
    return store.read(decision) == _ABORT or (store.read(decision) is None and store.create(decision, _ABORT))


def _attempt_prefixes(store: Store) -> list[str]:
    listed = {
        f"{_CHECKPOINTS}/{step}/{attempt}"
        for step in store.list(_CHECKPOINTS)
        if step.startswith("step-")
        for attempt in store.list(f"{_CHECKPOINTS}/{step}")
    }
    hint = (store.read(_NEWEST) or b"").decode(errors="replace")
    if _PREFIX.fullmatch(hint) and store.read(f"{hint}/{COMMIT_NAME}") is not None:  # newer than the listing, perhaps
        listed.add(hint)
    return sorted(listed)


def _generation_key(generation: int) -> str:
    return f"{_GENERATIONS}/{generation:04d}"


def _generation_of(prefix: str) -> int:
    number = prefix.rsplit("/", 1)[-1].partition("-")[0]
    return int(number) if number.isdigit() else 0


def _vote_key(key: AttemptKey, rank: int) -> str:
    return f"{key.prefix}/vote-{rank}.json"


def _read_vote(store: Store, key: AttemptKey, rank: int) -> Vote | str:
    """The vote, or what is wrong with it."""
    data = store.read(_vote_key(key, rank))
    if data is None:
        return "gave no vote"
    try:
        fields: Mapping[str, Any] = json.loads(data)
        return Vote(
            rank=fields["rank"],
            step=fields["step"],
            generation=fields["generation"],
            files=tuple(FileEntry(**entry) for entry in fields["files"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        return f"gave a vote that cannot be read: {error}"
