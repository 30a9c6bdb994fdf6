"""Files of an attempt, written straight into the store and hashed on the way.

Owns torch.distributed.checkpoint's view of a store, and the list of what one rank wrote. Knows nothing of votes. The
one decision: bytes are hashed as they are handed over, so a vote says what the rank meant to write, not what a disk
gave back, and a remote store gets no detour over a local copy.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase

from pipeline.artifacts.manifest import FileEntry
from pipeline.artifacts.store import Store

_UNFINISHED = ".tmp"


class AttemptFiles(FileSystemBase):
    """What one rank writes under one attempt's prefix."""

    def __init__(self, store: Store, *, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._written: dict[str, FileEntry] = {}

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """Every file that was written whole, with paths relative to the attempt."""
        return tuple(self._written.values())

    def put(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self.create_stream(f"{self._prefix}/{name}", "wb") as stream:
            stream.write(content)

    def dcp_writer(self, directory: str) -> dcp.FileSystemWriter:
        """A writer of torch.distributed.checkpoint into a directory of the attempt."""
        writer = dcp.FileSystemWriter(directory, sync_files=False)  # the store syncs what it closes
        writer.fs, writer.path = self, f"{self._prefix}/{directory}"
        return writer

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A stream to write a file; nothing is left of it where the block raises."""
        if mode != "wb":
            raise ValueError(f"an attempt's files are written once, not opened with {mode!r}")
        key = str(path).removesuffix(_UNFINISHED)
        with self._store.writing(key) as raw:
            stream = _Hashing(raw)
            yield stream
        name = key.removeprefix(f"{self._prefix}/")
        self._written[name] = FileEntry(path=name, size=stream.size, sha256=stream.digest.hexdigest())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Of a file in a directory."""
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """As it is."""
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing; the store makes directories where it has any."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """False: an attempt's prefix is unique, so there is nothing under it to be replaced."""
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Nothing: a file has its final name from the start, for nothing under it counts before the commit.

        On an object store a rename would be a copy and a deletion.
        """
        if str(path).removesuffix(_UNFINISHED) != str(new_path):
            raise ValueError(f"{path} cannot become {new_path}")

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete a file."""
        self._store.delete(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for every key."""
        return True


class _Hashing(io.RawIOBase):
    """Passes bytes on to `raw`, which its owner closes."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self.size = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._raw.write(view)
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size
