"""S3 keeps the promises of a store, and of the commit protocol on it: moto's server on the loopback interface."""

import errno
import socket
import threading

import botocore.exceptions
import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pipeline.artifacts.driver_errors import as_os_errors, os_error_of
from pipeline.artifacts.manifest import FileEntry, sha256_of
from pipeline.artifacts.store import Store, open_store
from pipeline.errors import StoreError
from pipeline.training.checkpoints.commit import (
    AttemptKey,
    claim_generation,
    commit,
    find_resumable,
    retain,
    write_vote,
)
from pipeline.training.checkpoints.shard_writer import AttemptFiles

WORLD = 2
MULTIPART_BYTES = 6 << 20
"""Above the smallest part of a multi-part upload, 5 MiB."""


def test_objects_are_written_once_read_at_once_and_listed(s3: str) -> None:
    store = open_store(s3)
    store.check_writable()
    assert store.list("") == []
    store.write("a/b.json", b"one")
    store.write("a/b.json", b"three")
    assert (store.read("a/b.json"), store.size("a/b.json"), store.list("a")) == (b"three", 5, ["b.json"])
    assert (store.read("a/c"), store.size("a/c"), store.list("c")) == (None, None, [])
    store.move("a/b.json", "c/d.json")
    assert (store.read("a/b.json"), store.read("c/d.json")) == (None, b"three")
    store.delete("c")
    store.delete("c")
    assert store.list("c") == []


def test_exactly_one_of_many_clients_creates(s3: str) -> None:
    stores = [open_store(s3) for _ in range(4)]
    won: list[int] = []
    barrier = threading.Barrier(len(stores))

    def contend(number: int) -> None:
        barrier.wait()
        if stores[number].create("lease", f"client {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert stores[0].read("lease") == f"client {won[0]}".encode()


def test_a_stream_arrives_whole_in_parts_or_not_at_all(s3: str) -> None:
    store: Store = open_store(s3)
    store._files.default_block_size = 5 << 20  # two parts  # type: ignore[attr-defined]
    block = bytes(range(256)) * 1024
    with store.writing("shard") as stream:
        for _ in range(MULTIPART_BYTES // len(block)):
            stream.write(block)
    assert store.size("shard") == MULTIPART_BYTES
    with pytest.raises(StoreError, match="No space"), store.writing("torn") as stream:
        for _ in range(MULTIPART_BYTES // len(block)):
            stream.write(block)
        raise OSError("No space left on device")
    assert store.read("torn") is None
    assert store.list("") == ["shard"]


def save(store: Store, step: int, *, generation: int) -> None:
    key = AttemptKey.new(step=step, generation=generation)
    for rank in range(WORLD):
        files = AttemptFiles(store, prefix=key.prefix)
        if rank == 0:
            dcp.save({"weight": torch.full((3, 5), float(step))}, storage_writer=files.dcp_writer("dcp"), no_dist=True)
        files.put(f"rank-{rank}.pt", f"state of rank {rank} at {step}".encode())
        write_vote(store, key, rank=rank, files=files.entries)
    commit(store, key, world_size=WORLD)


def test_checkpoints_are_committed_found_and_retained(s3: str) -> None:
    store = open_store(s3)
    assert [claim_generation(store) for _ in range(2)] == [1, 2]
    for step in (3, 6, 9):
        save(store, step, generation=2)
    unfinished = AttemptKey.new(step=12, generation=1)
    store.write(f"{unfinished.prefix}/dcp/__0_0.distcp", b"half")
    retain(store, keep=2, generation=2)
    found = find_resumable(open_store(s3))
    assert ([item.key.step for item in found.commits], found.num_uncommitted, found.rejected) == ([9, 6], 0, ())
    files: tuple[FileEntry, ...] = found.commits[0].files
    local = store.local_path(found.commits[0].key.prefix, names=[entry.path for entry in files])
    assert (local / "rank-1.pt").read_bytes() == b"state of rank 1 at 9"
    assert [sha256_of(local / entry.path) for entry in files] == [entry.sha256 for entry in files]
    loaded = {"weight": torch.zeros(3, 5)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(local / "dcp"), no_dist=True)
    assert torch.equal(loaded["weight"], torch.full((3, 5), 9.0))
    store.forget_local(found.commits[0].key.prefix)
    assert not local.exists()


def test_a_bucket_that_is_not_there_is_an_error_with_the_url(s3: str) -> None:
    with pytest.raises(StoreError, match=r"s3://absent/x: cannot create .probe"):
        open_store("s3://absent/x").check_writable()


@pytest.fixture
def away(s3: str, monkeypatch) -> Store:
    """A store whose endpoint does not answer, and is not asked again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("pipeline.artifacts.fsspec_store._RETRY_SECONDS", 0.0)
    files = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(files, "retries", 1)
    files.clear_instance_cache()
    return open_store(f"{s3}/away")


def test_an_endpoint_that_does_not_answer_is_an_error_of_the_store(away: Store) -> None:
    def stream() -> None:
        with away.writing("shard") as raw:
            raw.write(b"bytes")

    asked = {
        "read": lambda: away.read("a"),
        "write": stream,
        "create": lambda: away.create("a", b"x"),
        "list": lambda: away.list("a"),
        "look at": lambda: away.size("a"),
        "delete": lambda: away.delete("a"),
    }
    for action, ask in asked.items():
        with pytest.raises(StoreError, match=rf"cannot {action} .*127\.0\.0\.1"):
            ask()


def test_errors_of_drivers_say_whether_another_try_may_help() -> None:
    found = {
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"): errno.EIO,
        botocore.exceptions.ConnectionClosedError(endpoint_url="http://x"): errno.EIO,
        botocore.exceptions.NoCredentialsError(): errno.EACCES,
        botocore.exceptions.ParamValidationError(report="x"): errno.EINVAL,
    }
    assert {error: os_error_of(error).errno for error in found} == found  # type: ignore[union-attr]
    with pytest.raises(PermissionError, match="NoCredentialsError: Unable to locate credentials"), as_os_errors():
        raise botocore.exceptions.NoCredentialsError
    with pytest.raises(KeyError), as_os_errors():
        raise KeyError("a fault of this program")
