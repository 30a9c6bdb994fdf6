"""A store in a directory of this machine (or of a shared file system).

Owns durable writes on a POSIX file system. The one decision: a conditional create writes a temporary file, syncs it
and hard-links it to its name: the link fails where the name exists, and the name never shows half an object. Nothing
relies on what NFS does not promise: exclusive opens, `stat` of what another client wrote, or the answer to a link.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import StoreError


def sync_directory(directory: Path) -> None:
    """Make names in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(directory: Path) -> None:
    """Make it and its parents, durably: a file in a directory whose name is lost is lost too."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.is_dir()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


@contextlib.contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"store: cannot {action} {path}: {error.strerror or error}",
            hint="check that the directory exists, is writable and has space, or set another store with --store",
        ) from error


class LocalStore:
    """`Store` over a directory."""

    is_local = True

    def __init__(self, url: str) -> None:
        self.root = Path(url.removeprefix("file://")).absolute()

    @property
    def url(self) -> str:
        """The directory."""
        return str(self.root)

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        path = self.root / key
        with _explained("read", path):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, key: str, data: bytes) -> None:
        """See `Store.write`."""
        path = self.root / key
        with _explained("write", path):
            temporary = self._write_temporary(path, data)
            temporary.replace(path)

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """See `Store.writing`."""
        path = self.root / key
        with _explained("write", path):
            _make_directory(path.parent)
            temporary = path.parent / f".writing-{secrets.token_hex(8)}"
            try:
                with temporary.open("xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        path = self.root / key
        with _explained("create", path):
            temporary = self._write_temporary(path, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                # NFS sends a request again whose answer was lost, and it finds its own link.
                return temporary.stat().st_nlink > 1
            finally:
                temporary.unlink()
            sync_directory(path.parent)
            return True

    def list(self, prefix: str) -> list[str]:
        """See `Store.list`; temporary files of writers are not shown."""
        path = self.root / prefix
        with _explained("list", path):
            try:
                return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".writing-"))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, key: str) -> int | None:
        """See `Store.size`."""
        path = self.root / key
        with _explained("look at", path):
            try:
                # An open asks the server; `stat` may answer from an NFS client's cache.
                with path.open("rb") as file:
                    return file.seek(0, os.SEEK_END)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def move(self, key: str, to: str) -> None:
        """See `Store.move`."""
        path = self.root / key
        with _explained("move", path):
            target = self.root / to
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)

    def delete(self, prefix: str) -> None:
        """See `Store.delete`."""
        path = self.root / prefix
        with _explained("delete", path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def attempt_directory(self, key: str) -> Path:
        """See `Store.attempt_directory`."""
        path = self.root / key
        with _explained("create", path):
            path.mkdir(parents=True, exist_ok=False)
        return path

    def publish(self, directory: Path, key: str) -> None:
        """See `Store.publish`: the files are in place; sync them."""
        with _explained("sync", directory):
            for parent, _, names in os.walk(directory):
                for name in names:
                    with (Path(parent) / name).open("rb") as file:
                        os.fsync(file.fileno())
                sync_directory(Path(parent))

    def local_path(self, key: str, *, names: Sequence[str] | None = None) -> Path:
        """See `Store.local_path`."""
        return self.root / key

    def forget_local(self, key: str) -> None:
        """See `Store.forget_local`."""

    def workspace(self, key: str) -> str:
        """See `Store.workspace`."""
        path = self.root / key
        with _explained("create", path):
            path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def check_writable(self) -> None:
        """See `Store.check_writable`."""
        key = f".probe-{secrets.token_hex(4)}"
        self.create(key, b"probe")
        self.delete(key)

    def _write_temporary(self, path: Path, data: bytes) -> Path:
        _make_directory(path.parent)
        temporary = path.parent / f".writing-{secrets.token_hex(8)}"
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return temporary
