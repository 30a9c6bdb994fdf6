"""Both stores keep the same promises."""

import secrets
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.artifacts.store import Store, open_store
from pipeline.errors import StoreError


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    return open_store(f"memory://{secrets.token_hex(6)}")


def test_what_was_written_is_read(store: Store) -> None:
    store.write("a/b.json", b"one")
    store.write("a/b.json", b"two")
    assert store.read("a/b.json") == b"two"
    assert store.size("a/b.json") == 3
    assert store.list("a") == ["b.json"]


def test_what_is_absent_is_none_or_empty(store: Store) -> None:
    assert store.read("nothing") is None
    assert store.size("nothing") is None
    assert store.list("nothing") == []
    store.delete("nothing")


def test_create_succeeds_once_and_keeps_the_first_bytes(store: Store) -> None:
    assert store.create("a/COMMIT.json", b"first")
    assert not store.create("a/COMMIT.json", b"second")
    assert store.read("a/COMMIT.json") == b"first"


def test_exactly_one_of_many_threads_creates(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    won: list[int] = []
    barrier = threading.Barrier(8)

    def contend(number: int) -> None:
        barrier.wait()
        if store.create("lease", str(number).encode() * 1000):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("lease") == str(won[0]).encode() * 1000
    assert store.list("") == ["lease"]


def test_move_and_delete(store: Store) -> None:
    store.write("a/x", b"1")
    store.move("a/x", "b/y")
    assert store.read("a/x") is None
    assert store.read("b/y") == b"1"
    store.delete("b")
    assert store.list("b") == []


def test_an_attempts_files_are_readable_after_publishing(store: Store) -> None:
    directory = store.attempt_directory("artifacts/f/run-1")
    (directory / "model").mkdir()
    (directory / "model" / "weights").write_bytes(b"w" * 100)
    store.publish(directory, "artifacts/f/run-1")
    assert store.size("artifacts/f/run-1/model/weights") == 100
    assert (store.local_path("artifacts/f/run-1/model") / "weights").read_bytes() == b"w" * 100


def test_an_attempt_directory_is_never_shared(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.attempt_directory("artifacts/f/run-1")
    with pytest.raises(StoreError):
        store.attempt_directory("artifacts/f/run-1")


def test_a_store_that_cannot_be_written_says_where_and_what_to_do(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with pytest.raises(StoreError, match=r"cannot create .*file/.*\n  hint: .*--store"):
        open_store(str(blocker)).check_writable()


def test_an_unknown_protocol_is_an_error_that_names_the_url() -> None:
    with pytest.raises(StoreError, match="nosuchprotocol://x"):
        open_store("nosuchprotocol://x")


def test_one_of_many_downloads_and_the_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://{secrets.token_hex(6)}"
    open_store(url).write("step/shard", b"bytes")
    downloads: list[str] = []
    get_file = MemoryFileSystem.get_file

    def counted(*given: Any, **options: Any) -> Any:
        downloads.append(given[1])
        time.sleep(0.1)
        return get_file(*given, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: open_store(url).local_path("step") / "shard", range(4)))
    assert [path.read_bytes() for path in found] == [b"bytes"] * 4
    assert len(downloads) == 1
