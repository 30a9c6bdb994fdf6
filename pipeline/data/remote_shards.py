"""Shards of a dataset that lie behind an fsspec URL, fetched one by one into a bounded cache.

Owns the way of a shard from its store to a mapped file of this host. Knows nothing of orders or rows. The one decision:
the cache is a directory that the ranks of a host and later runs share; a file in it is complete and has the manifest's
sha256, or does not have its name.
"""

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from pipeline.artifacts.driver_errors import as_os_errors
from pipeline.artifacts.manifest import sha256_of
from pipeline.data.background import Background
from pipeline.data.manifest import Manifest, ShardEntry, Streaming
from pipeline.data.packed_shards import map_documents, map_rows
from pipeline.errors import ArtifactError, ParameterError

CACHE_BYTES = 4 << 30
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5
"""Before the second attempt; doubled before each later one."""
_CHUNK_BYTES = 4 << 20
_WINDOWS_KEPT = 2
"""The one that is read and the next one."""


class RemoteShards:
    """See `PackedShards`."""

    def __init__(
        self,
        manifest: Manifest,
        streaming: Streaming,
        *,
        workers: int,
        cache_bytes: int | None,
        cache_directory: Path | None = None,
    ) -> None:
        """Look at sizes alone; nothing is fetched.

        Raises:
            ParameterError: the location cannot be opened, or a cache of `cache_bytes` cannot hold two windows of
                shards; where that is None, there is room for them, and for `CACHE_BYTES` in any case.
        """
        self._manifest, self._location = manifest, streaming.location.rstrip("/")
        self._limit = self._checked_limit(streaming, cache_bytes)
        try:
            with as_os_errors():
                self._files, self._root = fsspec.core.url_to_fs(self._location, use_listings_cache=False)
        except (OSError, ValueError, ImportError) as error:
            raise ParameterError(f"dataset at {self._location}: cannot be opened: {error}") from error
        name = hashlib.sha256(self._location.encode()).hexdigest()[:16]
        self._cache = cache_directory or Path(tempfile.gettempdir()) / f"pipeline-shards-{os.getuid()}-{name}"
        self._lock = threading.Lock()
        self._mapped: OrderedDict[str, npt.NDArray[Any]] = OrderedDict()
        self._owed: dict[str, Future[npt.NDArray[Any]]] = {}
        self._threads = Background(name="shards", workers=workers)
        self._most_mapped = 2 * _WINDOWS_KEPT * streaming.shuffled_shards

    def rows(self, split: str, number: int) -> npt.NDArray[Any]:
        """See `PackedShards`."""
        return self._get(self._manifest.splits[split].shards[number], self._map_rows)

    def documents(self, split: str, number: int) -> npt.NDArray[np.int64]:
        """See `PackedShards`."""
        return self._get(self._manifest.splits[split].documents[number], self._map_documents)

    def read_ahead(self, split: str, numbers: Sequence[int]) -> None:
        """See `PackedShards`."""
        entries = self._manifest.splits[split]
        for number in numbers:
            self._owe(entries.shards[number], self._map_rows)
            self._owe(entries.documents[number], self._map_documents)

    @property
    def waiting_for(self) -> str | None:
        """Shards that are being fetched, in words; None where there are none."""
        with self._lock:
            names = sorted(self._owed)
        return f"{', '.join(names)} of {self._location}" if names else None

    def _get(self, entry: ShardEntry, load: Callable[[ShardEntry], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        found = self._owe(entry, load)
        return found.result() if isinstance(found, Future) else found

    def _owe(
        self, entry: ShardEntry, load: Callable[[ShardEntry], npt.NDArray[Any]]
    ) -> "Future[npt.NDArray[Any]] | npt.NDArray[Any]":
        """The mapped file, or what a thread is fetching."""
        with self._lock:
            mapped = self._mapped.get(entry.file)
            if mapped is not None:
                self._mapped.move_to_end(entry.file)
                return mapped
            if entry.file not in self._owed:
                self._owed[entry.file] = self._threads.submit(lambda: self._load(entry, load))
            return self._owed[entry.file]

    def _load(self, entry: ShardEntry, load: Callable[[ShardEntry], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        try:
            mapped = load(entry)
            with self._lock:
                self._mapped[entry.file] = mapped
                while len(self._mapped) > self._most_mapped:
                    self._mapped.popitem(last=False)
            return mapped
        finally:
            with self._lock:
                self._owed.pop(entry.file, None)

    def _map_rows(self, entry: ShardEntry) -> npt.NDArray[Any]:
        with self._fetched(entry):
            return map_rows(self._cache, entry, manifest=self._manifest, verify=False)

    def _map_documents(self, entry: ShardEntry) -> npt.NDArray[np.int64]:
        with self._fetched(entry):
            return map_documents(self._cache, entry, verify=False)

    @contextmanager
    def _fetched(self, entry: ShardEntry) -> Iterator[None]:
        """Hold the cache's file `entry`, which is complete."""
        self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._cache / f"{entry.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._cache / entry.file
            with suppress(FileNotFoundError):  # before it is hashed, which takes time in which others make room
                os.utime(path)
            if not _is_intact(path, entry):
                self._make_room(entry)
                self._fetch(entry, path)
            yield

    def _fetch(self, entry: ShardEntry, path: Path) -> None:
        """Download with retries.

        Raises:
            ArtifactError: it stays away or damaged.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with as_os_errors():
                    complaint = self._download(entry, path)
            except OSError as error:
                complaint = f"cannot be read ({type(error).__name__}: {error})"
            if complaint is None:
                return
            if attempt < _ATTEMPTS:
                time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        raise ArtifactError(
            f"shard {entry.file} of {self._location}: {complaint}, {_ATTEMPTS} times",
            hint="look whether the store is there and the dataset as it was written; training resumes from its last "
            "checkpoint",
        )

    def _download(self, entry: ShardEntry, path: Path) -> str | None:
        """Put the file into the cache; what is wrong with it, or None."""
        hasher, size = hashlib.sha256(), 0
        part = path.with_name(f"{path.name}.part")
        with self._files.open(f"{self._root.rstrip('/')}/{entry.file}", "rb") as source, part.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                hasher.update(chunk)
                size += len(chunk)
                target.write(chunk)
        if size != entry.num_bytes:
            return f"{size} bytes, the manifest says {entry.num_bytes}"
        if hasher.hexdigest() != entry.sha256:
            return "altered (its sha256 is not the manifest's)"
        part.replace(path)
        return None

    def _make_room(self, entry: ShardEntry) -> None:
        """Delete what was used longest ago; a file that is mapped stays readable for who has it."""
        files = []
        for path in self._cache.glob("*.npy"):
            with suppress(FileNotFoundError):  # another rank makes room too
                files.append((path.stat(), path))
        total = sum(status.st_size for status, _ in files) + entry.num_bytes
        for status, path in sorted(files, key=lambda item: item[0].st_mtime):
            if total <= self._limit:
                return
            if _deleted(path):
                total -= status.st_size

    def _checked_limit(self, streaming: Streaming, cache_bytes: int | None) -> int:
        largest = max(
            (
                shard.num_bytes + documents.num_bytes
                for split in self._manifest.splits.values()
                for shard, documents in zip(split.shards, split.documents, strict=True)
            ),
            default=0,
        )
        needed = _WINDOWS_KEPT * streaming.shuffled_shards * largest
        if cache_bytes is None:
            return max(needed, CACHE_BYTES)
        if needed > cache_bytes:
            raise ParameterError(
                f"dataset at {self._location}: {_WINDOWS_KEPT} windows of {streaming.shuffled_shards} shards take "
                f"{needed:,} bytes, the cache may have {cache_bytes:,}",
                hint="raise `loader_cache_bytes`, or lower `shuffled_shards` of `data.stream`",
            )
        return cache_bytes


def _deleted(path: Path) -> bool:
    """Delete a file of the cache unless a thread or rank is about to map it."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        return True


def _is_intact(path: Path, entry: ShardEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256
