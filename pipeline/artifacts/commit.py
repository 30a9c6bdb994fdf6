"""The commit: the one object that makes an attempt's files an artifact.

Owns `artifacts/<fingerprint>/COMMIT.json` and its verification. The one decision: presumed abort. Files of an attempt
mean nothing until the commit names them; whoever creates the commit first wins, and a loser's files are just rubbish.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.manifest import FileEntry, digest_of, list_files, sha256_of
from pipeline.artifacts.store import Store
from pipeline.errors import ArtifactError

COMMIT_NAME = "COMMIT.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedOutput:
    """One named output directory of a stage."""

    type: str
    digest: str
    files: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedInput:
    """What one input was when the stage ran."""

    stage: str
    output: str
    fingerprint: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Everything known of a committed stage result."""

    fingerprint: str
    attempt_key: str
    """Key of the directory that holds one sub-directory an output."""
    kind: str
    stage: str
    flow: str
    run_id: str
    created_at: float
    """Seconds since the epoch."""
    outputs: Mapping[str, CommittedOutput]
    inputs: Mapping[str, CommittedInput] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    """What the fingerprint was made of."""
    attempt: int = 1

    def to_json(self) -> bytes:
        """Stable, readable JSON."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> "Commit":
        """Parse a commit.

        Raises:
            ArtifactError: the text is not a commit; `where` names it.
        """
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("written by another version of this program")
            fields["outputs"] = {
                name: CommittedOutput(
                    type=output["type"],
                    digest=output["digest"],
                    files=tuple(FileEntry(**entry) for entry in output["files"]),
                )
                for name, output in fields["outputs"].items()
            }
            fields["inputs"] = {name: CommittedInput(**value) for name, value in fields["inputs"].items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{where} is not a readable commit: {error}") from error


def artifact_key(fingerprint: str) -> str:
    """Key of everything that belongs to a fingerprint."""
    return f"artifacts/{fingerprint}"


def commit_key(fingerprint: str) -> str:
    """Key of the commit itself."""
    return f"{artifact_key(fingerprint)}/{COMMIT_NAME}"


def find_commit(store: Store, fingerprint: str) -> Commit | None:
    """The commit of a fingerprint, or None where nothing is committed.

    Raises:
        ArtifactError: there is a commit, but it is not readable.
    """
    data = store.read(commit_key(fingerprint))
    if data is None:
        return None
    return Commit.from_json(data, where=f"{store.url}/{commit_key(fingerprint)}")


def describe_outputs(directory: Path, types: Mapping[str, str]) -> dict[str, CommittedOutput]:
    """Hash what an attempt wrote.

    Raises:
        ArtifactError: a declared output has no file, or a directory was written that nobody declared.
    """
    written = {path.name for path in directory.iterdir()} if directory.exists() else set()
    problems = [f"output {name!r} was declared but nothing was written to it" for name in sorted(set(types) - written)]
    problems += [f"{name!r} was written but is no declared output" for name in sorted(written - set(types))]
    outputs = {}
    for name, artifact_type in types.items():
        files = list_files(directory / name) if name in written else ()
        if name in written and not files:
            problems.append(f"output {name!r} has no file in it")
        outputs[name] = CommittedOutput(type=artifact_type, digest=digest_of(files), files=files)
    if problems:
        raise ArtifactError("the stage's outputs do not match its kind: " + "; ".join(problems))
    return outputs


def replace_commit(store: Store, commit: Commit) -> Commit:
    """Create the commit; whoever calls holds the fingerprint's lease and computed it on purpose.

    An older commit of the same fingerprint (damaged, or computed again by force) moves aside under another name; its
    files stay where they are.
    """
    while not store.create(commit_key(commit.fingerprint), commit.to_json()):
        label = f"{commit.run_id}-{commit.attempt}"
        store.move(commit_key(commit.fingerprint), f"{artifact_key(commit.fingerprint)}/REPLACED-BY-{label}.json")
    return commit


def why_damaged(store: Store, commit: Commit, *, hashes: bool) -> str | None:
    """Why the committed files are not what the commit says, or None when they are.

    Args:
        store: where the files are.
        commit: what they should be.
        hashes: compare contents too, not just presence and size (reads every byte; local stores only, for a remote
            store hashes are compared where files are downloaded and used).
    """
    for name, output in commit.outputs.items():
        for entry in output.files:
            key = f"{commit.attempt_key}/{name}/{entry.path}"
            size = store.size(key)
            if size is None:
                return f"{key} is missing"
            if size != entry.size:
                return f"{key} has {size} bytes, committed were {entry.size}"
            if hashes and store.is_local and sha256_of(store.local_path(key)) != entry.sha256:
                return f"{key} was altered: its sha256 is not the committed one"
    return None
