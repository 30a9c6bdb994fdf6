"""A commit is all or nothing, and damage is noticed."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.artifacts.commit import Commit, describe_outputs, find_commit, replace_commit, why_damaged
from pipeline.artifacts.store import Store, open_store
from pipeline.errors import ArtifactError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def write_attempt(store: Store, *, content: bytes = b"weights", run_id: str = "run") -> Commit:
    key = f"artifacts/f00d/{run_id}-1"
    directory = store.attempt_directory(key)
    (directory / "model").mkdir()
    (directory / "model" / "a.bin").write_bytes(content)
    return Commit(
        fingerprint="f00d",
        attempt_key=key,
        kind="convert.flax",
        stage="flax",
        flow="llm",
        run_id=run_id,
        created_at=1.0,
        outputs=describe_outputs(directory, {"model": "flax-model"}),
        metrics={"num_parameters": 7.0},
        facts={"device": "cpu"},
        parts={"kind": "convert.flax"},
    )


def test_nothing_is_committed_before_the_commit(store: Store) -> None:
    write_attempt(store)
    assert find_commit(store, "f00d") is None


def test_a_commit_reads_back_equal(store: Store) -> None:
    commit = replace_commit(store, write_attempt(store))
    assert find_commit(store, "f00d") == commit
    assert why_damaged(store, commit, hashes=True) is None


def test_committing_again_keeps_the_older_commit_and_its_files(store: Store) -> None:
    replace_commit(store, write_attempt(store, content=b"old", run_id="run1"))
    newer = replace_commit(store, write_attempt(store, content=b"new", run_id="run2"))
    assert find_commit(store, "f00d") == newer
    names = store.list("artifacts/f00d")
    assert any(name.startswith("REPLACED-BY-run2") for name in names)
    assert store.read("artifacts/f00d/run1-1/model/a.bin") == b"old"


@pytest.mark.parametrize(
    ("damage", "hashes", "words"),
    [
        (lambda path: path.unlink(), False, "is missing"),
        (lambda path: path.write_bytes(b"weight"), False, "has 6 bytes, committed were 7"),
        (lambda path: path.write_bytes(b"Weights"), True, "was altered"),
    ],
)
def test_damage_is_named(store: Store, damage: object, hashes: bool, words: str) -> None:
    commit = replace_commit(store, write_attempt(store))
    damage(store.local_path(f"{commit.attempt_key}/model/a.bin"))  # type: ignore[operator]
    reason = why_damaged(store, commit, hashes=hashes)
    assert reason is not None
    assert "model/a.bin" in reason
    assert words in reason


def test_the_digest_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    first = write_attempt(open_store(str(tmp_path / "one")))
    second = write_attempt(open_store(str(tmp_path / "two")), run_id="other")
    third = write_attempt(open_store(str(tmp_path / "three")), content=b"weightz")
    assert first.outputs["model"].digest == second.outputs["model"].digest
    assert first.outputs["model"].digest != third.outputs["model"].digest


def test_outputs_that_do_not_match_the_kind_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError) as raised:
        describe_outputs(tmp_path, {"model": "flax-model", "empty": "files"})
    for words in ("'model' was declared but nothing", "'extra' was written but is no declared", "'empty' has no file"):
        assert words in str(raised.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 99}', b'{"format": 1, "outputs": 3}', b"\xff\xfe"])
def test_a_torn_commit_is_an_artifact_error_that_names_the_file(store: Store, text: bytes) -> None:
    store.write("artifacts/f00d/COMMIT.json", text)
    with pytest.raises(ArtifactError, match=r"artifacts/f00d/COMMIT\.json is not a readable commit"):
        find_commit(store, "f00d")


def test_unknown_fields_are_refused(store: Store) -> None:
    commit = write_attempt(store)
    text = replace(commit).to_json().replace(b'"attempt"', b'"atempt"')
    with pytest.raises(ArtifactError):
        Commit.from_json(text, where="here")
