"""A store behind any fsspec URL: S3, GCS, Azure, `memory://` in tests.

Owns the mapping of the store's few operations to fsspec. The one decision: conditional creation is fsspec's
`mode="create"` (`If-None-Match: *` on S3, generation 0 on GCS); listing caches are off, for another process's commit
must be seen at once.
"""

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec

from pipeline.errors import StoreError


class FsspecStore:
    """`Store` over an fsspec file system; artifacts are downloaded once into a cache directory of this user."""

    is_local = False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with self._explained("open", url):
            self._files, self._root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        name = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        self._cache = Path(tempfile.gettempdir()) / f"pipeline-store-{name}"

    @property
    def url(self) -> str:
        """The fsspec URL."""
        return self._url

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        with self._explained("read", key):
            try:
                return bytes(self._files.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        """See `Store.write`."""
        with self._explained("write", key):
            self._make_parent(key)
            self._files.pipe_file(self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        with self._explained("create", key):
            self._make_parent(key)
            try:
                self._files.pipe_file(self._path(key), data, mode="create")
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        """See `Store.list`."""
        with self._explained("list", prefix):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(self._path(prefix), detail=False)
            except FileNotFoundError:
                return []
            return sorted({entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries})

    def size(self, key: str) -> int | None:
        """See `Store.size`."""
        with self._explained("look at", key):
            self._files.invalidate_cache()
            try:
                return int(self._files.size(self._path(key)))
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
            self._files.rm(self._path(prefix), recursive=True)

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

    def local_path(self, key: str) -> Path:
        """See `Store.local_path`; the cache directory appears whole or not at all."""
        target = self._cache / key
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.parent / f".downloading-{secrets.token_hex(8)}"
            partial.mkdir()
            with self._explained("download", key):
                prefix = self._path(key).rstrip("/") + "/"
                for name in self._files.find(self._path(key)):
                    local = partial / name.removeprefix(prefix)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(name, str(local))
            with contextlib.suppress(OSError):  # another process was first; its copy is the same
                partial.rename(target)
        return target

    def workspace(self, key: str) -> str:
        """See `Store.workspace`."""
        return f"{self._url}/{key}"

    def check_writable(self) -> None:
        """See `Store.check_writable`."""
        key = f".probe-{secrets.token_hex(4)}"
        self.create(key, b"probe")
        self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _make_parent(self, key: str) -> None:
        self._files.makedirs(self._path(key).rsplit("/", 1)[0], exist_ok=True)

    @contextlib.contextmanager
    def _explained(self, action: str, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            raise StoreError(
                f"store {self._url}: cannot {action} {what}: {error}",
                hint="check the URL, the credentials and that the protocol's package (s3fs, gcsfs, ...) is installed",
            ) from error
