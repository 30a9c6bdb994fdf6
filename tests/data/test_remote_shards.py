"""Shards behind a URL: the rows of a local dataset, a bounded cache, damage named, faults of the store survived."""

import contextlib
import fcntl
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.exceptions
import fsspec
import numpy as np
import pytest

from pipeline.data.document import Document
from pipeline.data.manifest import Manifest, Streaming
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.remote_shards import RemoteShards
from pipeline.data.split import Split
from pipeline.errors import ArtifactError, ParameterError

WINDOW = 2
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Streamed:
    """A dataset on this disk, and the same one behind a URL."""

    local: PackedDataset
    url: str
    cache: Path
    files: Any
    """The store."""

    def open(self, *, cache_bytes: int | None = 1 << 30, workers: int = 1) -> PackedDataset:
        manifest = self.local.manifest
        streaming = Streaming(location=self.url, shuffled_shards=WINDOW)
        shards = RemoteShards(manifest, streaming, workers=workers, cache_bytes=cache_bytes, cache_directory=self.cache)
        values = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
        return PackedDataset(
            directory=self.local.directory,
            manifest=Manifest(**{**values, "streaming": streaming}),
            _shards=shards,
            _first_row=self.local._first_row,
        )

    @property
    def largest(self) -> int:
        split = self.local.manifest.splits["train"]
        return max(a.num_bytes + b.num_bytes for a, b in zip(split.shards, split.documents, strict=True))


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streamed]:
    monkeypatch.setattr("pipeline.data.remote_shards._PAUSE_SECONDS", 0.0)
    directory = tmp_path / "local"
    directory.mkdir()
    texts = [Document(name=str(n), text=f"def value_{n}():\n    return {n}\n" * 20) for n in range(40)]
    plan = PackingPlan(vocabulary_size=300, sequence_length=16, shard_tokens=256, seed=0)
    write_dataset(Split(train=texts[2:], validation=texts[:2]), directory, plan=plan, source={})
    url = f"memory://{uuid.uuid4().hex}/corpus"
    files, root = fsspec.core.url_to_fs(url)
    files.put(f"{directory}/", f"{root}/", recursive=True)
    yield Streamed(local=PackedDataset.open(directory), url=url, cache=tmp_path / "cache", files=files)
    files.rm(root, recursive=True)


def size_of(cache: Path) -> int:
    total = 0
    for path in cache.glob("*.npy"):
        with contextlib.suppress(FileNotFoundError):  # a thread that fetches the next window makes room
            total += path.stat().st_size
    return total


@pytest.mark.parametrize("workers", [1, 4])
def test_rows_are_those_of_the_files_in_the_windowed_order(streamed: Streamed, workers: int) -> None:
    remote = streamed.open(workers=workers)
    asked = {"rows_per_step": 64, "world_size": 2, "seed": 9}
    num_rows = remote.num_rows("train")
    seen: list[int] = []
    for step in range(num_rows // 64 + 1):
        for rank in (0, 1):
            positions = np.arange(64 * step + rank, 64 * (step + 1), 2)
            rows = remote.row_at(positions, seed=9)
            seen += rows.tolist()
            assert np.array_equal(remote.train_rows(step, rank=rank, **asked), streamed.local.rows("train", rows))
            assert np.array_equal(
                remote.train_positions(step, rank=rank, **asked), streamed.local.positions("train", rows)
            )
    assert set(seen) == set(range(num_rows))
    assert np.array_equal(remote.rows("validation", np.arange(2)), streamed.local.rows("validation", np.arange(2)))


def test_the_cache_stays_within_its_bound_and_is_used_again(streamed: Streamed) -> None:
    bound = 2 * WINDOW * streamed.largest
    train = streamed.local.manifest.splits["train"]
    assert sum(shard.num_bytes for shard in train.shards) > 2 * bound  # the dataset does not fit
    remote = streamed.open(cache_bytes=bound)
    for step in range(remote.num_rows("train") // 16):
        remote.train_rows(step, rows_per_step=16, rank=0, world_size=1, seed=0)
        assert size_of(streamed.cache) <= bound
    deadline = time.monotonic() + WAIT_SECONDS
    while remote.waiting_for is not None:  # what is fetched ahead makes room too
        assert time.monotonic() < deadline, remote.waiting_for
        time.sleep(0.01)
    name = next(iter(sorted(path.name for path in streamed.cache.glob("train-*[0-9].npy"))))
    number = int(name.removeprefix("train-").removesuffix(".npy"))
    streamed.files.rm(f"{streamed.files._strip_protocol(streamed.url)}/{name}")
    assert np.array_equal(streamed.open()._shards.rows("train", number), streamed.local._shards.rows("train", number))


def test_a_cache_that_is_too_small_is_refused_with_the_numbers(streamed: Streamed) -> None:
    with pytest.raises(ParameterError, match="2 windows of 2 shards take"):
        streamed.open(cache_bytes=streamed.largest)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_shard_is_named_and_never_read(streamed: Streamed, damage: str) -> None:
    path = f"{streamed.files._strip_protocol(streamed.url)}/train-00001.npy"
    content = bytearray(streamed.files.cat_file(path))
    content[-1] ^= 1
    if damage == "gone":
        streamed.files.rm(path)
    else:
        streamed.files.pipe_file(path, bytes(content if damage == "flipped" else content[:-5]))
    told = {"flipped": "altered", "short": r"bytes, the manifest says", "gone": "cannot be read"}[damage]
    with pytest.raises(ArtifactError, match=rf"shard train-00001\.npy of memory://.*{told}.*, 3 times"):
        streamed.open()._shards.rows("train", 1)
    assert not list(streamed.cache.glob("train-00001.npy"))


def test_a_store_that_fails_twice_is_asked_again(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Callable[..., Any] = type(streamed.files).open
    failures = iter([OSError("503 Slow Down"), OSError("reset by peer")])

    def open_late(*given: Any, **options: Any) -> Any:
        error = next(failures, None)
        if error is not None:
            raise error
        return opened(*given, **options)

    monkeypatch.setattr(type(streamed.files), "open", open_late)
    assert np.array_equal(streamed.open()._shards.rows("train", 0), streamed.local._shards.rows("train", 0))


def test_a_file_that_a_killed_process_left_half_written_is_fetched_again(streamed: Streamed) -> None:
    streamed.cache.mkdir()
    (streamed.cache / "train-00000.npy").write_bytes(b"half")
    assert np.array_equal(streamed.open()._shards.rows("train", 0), streamed.local._shards.rows("train", 0))
    assert json.loads((streamed.local.directory / "manifest.json").read_text())["streaming"] is None


def test_a_store_that_does_not_answer_is_the_error_of_a_shard_that_stays_away(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> Any:
        raise botocore.exceptions.EndpointConnectionError(endpoint_url="http://store")

    monkeypatch.setattr(type(streamed.files), "open", refuse)
    told = r"shard train-00000\.npy of memory://.*cannot be read .*EndpointConnectionError: .*http://store.*, 3 times"
    with pytest.raises(ArtifactError, match=told):
        streamed.open()._shards.rows("train", 0)


def test_a_shard_that_another_rank_is_about_to_map_is_not_deleted(streamed: Streamed) -> None:
    shards = streamed.open(cache_bytes=2 * WINDOW * streamed.largest)._shards
    shards.rows("train", 0)
    with (streamed.cache / "train-00000.npy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(1, len(streamed.local.manifest.splits["train"].shards)):
            shards.rows("train", number)
        assert (streamed.cache / "train-00000.npy").exists()
    assert not (streamed.cache / "train-00001.npy").exists()


def test_who_does_not_say_how_much_may_be_kept_is_not_refused(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.data.remote_shards.CACHE_BYTES", 1)
    shards = streamed.open(cache_bytes=None)._shards
    assert np.array_equal(shards.rows("train", 0), streamed.local._shards.rows("train", 0))
