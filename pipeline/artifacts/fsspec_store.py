"""A store behind any fsspec URL: S3, GCS, Azure, `memory://` in tests.

Owns the mapping of the store's few operations to fsspec. The one decision: conditional creation is fsspec's
`mode="create"` (`If-None-Match: *` on S3, generation 0 on GCS), and what was created is read back, for an answer may
get lost and a driver may promise too much. Listing caches are off, for another process's commit must be seen at once.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import fsspec

from pipeline.artifacts.driver_errors import as_os_errors
from pipeline.errors import StoreError

_FIRST_PAUSE_SECONDS = 0.1
_RETRY_SECONDS = 30.0
"""A request that fails for a passing reason is sent again for so long; s3fs sends each one five times by itself."""
_PASSING = frozenset(
    {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED}
)
"""EREMOTEIO is what s3fs makes of a 500."""
_WITHOUT_DIRECTORIES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Protocols where making a directory asks for a bucket, which needs rights that writing an object does not."""
_jitter = secrets.SystemRandom()

ValueT = TypeVar("ValueT")


class FsspecStore:
    """`Store` over an fsspec file system; artifacts are downloaded once into a cache directory of this user."""

    is_local = False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with self._explained("open", url):
            self._files, self._root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        protocol = self._files.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        name = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        self._cache = Path(tempfile.gettempdir()) / f"pipeline-store-{os.getuid()}-{name}"

    @property
    def url(self) -> str:
        """The fsspec URL."""
        return self._url

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        with self._explained("read", key):
            return _persistently(lambda: self._content(key))

    def write(self, key: str, data: bytes) -> None:
        """See `Store.write`."""
        with self._explained("write", key):
            self._make_parent(key)
            _persistently(lambda: self._files.pipe_file(self._path(key), data))

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """See `Store.writing`: uploaded in parts while it is written; nothing is sent again."""
        with self._explained("write", key):
            self._make_parent(key)
            stream = self._files.open(self._path(key), "wb")
            try:
                yield stream
            except BaseException:
                # Closing would upload what there is of it, as if it were the whole.
                with contextlib.suppress(OSError), as_os_errors():
                    stream.discard()
                stream.closed = True
                with contextlib.suppress(OSError), as_os_errors():
                    self._files.rm_file(self._path(key))
                raise
            stream.close()

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        with self._explained("create", key):
            self._make_parent(key)
            return _persistently(lambda: self._create(key, data))

    def _create(self, key: str, data: bytes) -> bool:
        """One request and a look at what it did."""
        problem = OSError(errno.EIO, f"{key} was created and is not there")
        try:
            with as_os_errors():
                self._files.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return self._content(key) == data
        except OSError as error:  # in doubt: the answer may be what failed
            problem = error
        found = self._content(key)
        if found is not None and found != data and data.startswith(found):
            self._files.rm_file(self._path(key))  # torn; nobody else's bytes begin like these and end sooner
            found = None
        if found is None:
            raise problem
        return found == data

    def _content(self, key: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(key)))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[str]:
        """See `Store.list`."""
        with self._explained("list", prefix):
            self._files.invalidate_cache()
            try:
                entries = _persistently(lambda: self._files.ls(self._path(prefix), detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted({entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries})

    def size(self, key: str) -> int | None:
        """See `Store.size`."""
        with self._explained("look at", key):
            self._files.invalidate_cache()
            try:
                return int(_persistently(lambda: self._files.size(self._path(key))))
            except FileNotFoundError:
                return None

    def move(self, key: str, to: str) -> None:
        """See `Store.move`."""
        with self._explained("move", key):
            self._make_parent(to)
            self._files.mv(self._path(key), self._path(to))

    def delete(self, prefix: str) -> None:
        """See `Store.delete`."""
        with self._explained("delete", prefix), contextlib.suppress(FileNotFoundError):
            _persistently(lambda: self._files.rm(self._path(prefix), recursive=True))

    def attempt_directory(self, key: str) -> Path:
        """See `Store.attempt_directory`: a fresh local directory."""
        return Path(tempfile.mkdtemp(prefix="pipeline-attempt-"))

    def publish(self, directory: Path, key: str) -> None:
        """See `Store.publish`: upload."""
        with self._explained("upload to", key):
            for path in sorted(directory.rglob("*")):
                if path.is_file():
                    target = f"{key}/{path.relative_to(directory).as_posix()}"
                    self._make_parent(target)
                    self._files.put_file(str(path), self._path(target))

    def local_path(self, key: str, *, names: Sequence[str] | None = None) -> Path:
        """See `Store.local_path`; one process of this host downloads it, and the others wait."""
        target = self._cache / key
        if not target.exists():
            with self._alone(key):
                if not target.exists():
                    self._fill(target, key, names)
        return target

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Hold the right to download `key`, which a process that dies gives up."""
        locks = self._cache / ".locks"
        self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        locks.mkdir(exist_ok=True)
        with (locks / hashlib.sha256(key.encode()).hexdigest()).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _fill(self, target: Path, key: str, names: Sequence[str] | None) -> None:
        """Download; the directory appears whole or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".downloading-{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            with self._explained("download", key):
                for name in self._names(key) if names is None else names:
                    self._download(f"{key}/{name}", partial / name)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _names(self, key: str) -> Sequence[str]:
        prefix = self._path(key).rstrip("/") + "/"
        found: Sequence[str] = _persistently(lambda: self._files.find(self._path(key)))
        return [name.removeprefix(prefix) for name in found]

    def _download(self, key: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        _persistently(lambda: self._files.get_file(self._path(key), str(local)))

    def forget_local(self, key: str) -> None:
        """See `Store.forget_local`."""
        shutil.rmtree(self._cache / key, ignore_errors=True)

    def workspace(self, key: str) -> str:
        """See `Store.workspace`."""
        return f"{self._url}/{key}"

    def check_writable(self) -> None:
        """See `Store.check_writable`."""
        key = f".probe-{secrets.token_hex(4)}"
        try:
            if not self.create(key, b"first") or self.create(key, b"second"):
                raise StoreError(
                    f"store {self._url}: an object can be created twice, so two runs could both hold a lease",
                    hint="the storage must honour conditional writes (If-None-Match on S3)",
                )
        finally:
            self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _make_parent(self, key: str) -> None:
        if not self._protocols & _WITHOUT_DIRECTORIES:
            self._files.makedirs(self._path(key).rsplit("/", 1)[0], exist_ok=True)

    @contextlib.contextmanager
    def _explained(self, action: str, what: str) -> Iterator[None]:
        try:
            with as_os_errors():
                yield
        except (OSError, ValueError, ImportError) as error:
            raise StoreError(
                f"store {self._url}: cannot {action} {what}: {error}",
                hint="check the URL, the credentials and that the protocol's package (s3fs, gcsfs, ...) is installed",
            ) from error


def _persistently(request: Callable[[], ValueT]) -> ValueT:
    """Send a request until it succeeds, fails for good, or `_RETRY_SECONDS` have passed; pauses double, with jitter."""
    deadline, pause = time.monotonic() + _RETRY_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        try:
            with as_os_errors():
                return request()
        except OSError as error:
            if not (isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING):
                raise
            pause *= 1 + _jitter.random()
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
