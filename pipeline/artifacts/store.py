"""Where artifacts, runs and leases live: a flat space of keys over any fsspec URL.

Owns the store's interface, the choice of its implementation, and the default place. Knows nothing of what the keys
mean. The one decision: everything that must happen once (a commit, a lease) is one conditional create of one small
object; nothing relies on renaming directories or on locks of a file system.
"""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

_BACKENDS: Mapping[str, str] = {
    "file": "pipeline.artifacts.local_store:LocalStore",
    "*": "pipeline.artifacts.fsspec_store:FsspecStore",
}


class Store(Protocol):
    """Keys are relative, `/`-separated. Every method raises `StoreError` when the storage refuses."""

    @property
    def url(self) -> str:
        """What opens this store again."""
        ...

    @property
    def is_local(self) -> bool:
        """True where `local_path` is the stored file itself."""
        ...

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None where there is no such object."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object; readers see the old bytes or the new, never a mix."""
        ...

    def writing(self, key: str) -> AbstractContextManager[BinaryIO]:
        """Stream a new object: whole and durable where the block ends, absent where it raises."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create an object if it does not exist; False where it does. Exactly one of several callers gets True.

        Callers that compete give bytes that differ: where the answer of a remote store got lost and the request was
        sent again, what lies there is all that tells who was first.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Names directly under `prefix`, sorted; empty where there are none."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of an object, or None where there is no such object."""
        ...

    def move(self, key: str, to: str) -> None:
        """Rename one object."""
        ...

    def delete(self, prefix: str) -> None:
        """Delete everything under `prefix`; nothing happens where there is nothing."""
        ...

    def attempt_directory(self, key: str) -> Path:
        """A local directory to write an attempt's files into; the place itself on a local store."""
        ...

    def publish(self, directory: Path, key: str) -> None:
        """Make what was written into `attempt_directory(key)` present under `key`, durably."""
        ...

    def local_path(self, key: str, *, names: Sequence[str] | None = None) -> Path:
        """A local directory with the objects under `key`; downloaded once on a remote store.

        Args:
            key: of a directory that does not change any more.
            names: of the objects, relative to it, where they are known; a remote store is not asked for a listing then.
        """
        ...

    def forget_local(self, key: str) -> None:
        """Drop a downloaded copy that is wrong, or no longer of use; a local store has none."""
        ...

    def workspace(self, key: str) -> str:
        """A path or URL under which workers of every node may write."""
        ...

    def check_writable(self) -> None:
        """Raise `StoreError` where an object cannot be created once and removed."""
        ...


def open_store(url: str) -> Store:
    """Open the store at a path or fsspec URL.

    Raises:
        StoreError: the URL's protocol is unknown or its package is missing.
    """
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    module, _, name = _BACKENDS.get(protocol, _BACKENDS["*"]).partition(":")
    store: Store = getattr(importlib.import_module(module), name)(url)
    return store
