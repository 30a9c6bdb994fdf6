"""Where a model lies: a local path as it is, a URL as a copy of what it holds now.

Owns the cache of such copies. Knows nothing of formats. The one decision: a copy is kept under the digest of what the
store says of its files (etag, checksum, size, time), so a model that changed is fetched again and one that did not is
not; the oldest copies make room for new ones.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import fsspec

from pipeline.data.remote import digest
from pipeline.errors import CheckpointError

MAX_CACHE_BYTES = 100_000_000_000
"""What all copies together may take; the least recently used go first."""
_LEFT_FREE_BYTES = 1_000_000_000
_PARTIAL = ".fetching-"
"""Before the names of copies that are not complete; they are never removed to make room."""
_FETCH_SECONDS = 6 * 3600.0
_LOCK_POLL_SECONDS = 0.2


def locate(text: str, *, cache: Path | None = None, max_cache_bytes: int = MAX_CACHE_BYTES) -> Path:
    """The local file or directory of a path or an fsspec URL (`s3://`, `gs://`, `memory://`, `file://`, ...).

    Args:
        text: a path is given back as it is; of a URL, a file or everything under a directory is fetched.
        cache: where copies lie; a directory of this user under the system's temporary one where None.
        max_cache_bytes: bounds the cache.

    Raises:
        CheckpointError: the model is larger than the cache or than what the disk has free, or cannot be fetched.
        ParameterError: the URL cannot be opened, or holds no file.
    """
    if "://" not in text:
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(fsspec.core.url_to_fs(text)[1])
    url = text.rstrip("/")
    root = _private(cache or Path(tempfile.gettempdir()) / f"pipeline-models-{os.getuid()}")
    kept = root / digest(url).rpartition(":")[2][:32]
    if not kept.is_dir():
        with _alone(kept.with_suffix(".lock"), url=url):
            if not kept.is_dir():  # else another process had the lock before; its copy is the same
                _fetch(url, to=kept, max_cache_bytes=max_cache_bytes)
    os.utime(kept)
    return _inside(kept, url=url)


def _private(directory: Path) -> Path:
    """The cache directory, made for this user alone: others must not put weights there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CheckpointError(
            f"{directory}: the cache of fetched models belongs to somebody else, or others may write to it",
            hint="remove it, or give it back: chmod 700",
        )
    return directory


@contextmanager
def _alone(lock: Path, *, url: str) -> Iterator[None]:
    """Hold the lock of a copy: processes of a machine that start together fetch a model once.

    Raises:
        CheckpointError: another process has fetched it for longer than `_FETCH_SECONDS`.
    """
    deadline = time.monotonic() + _FETCH_SECONDS
    with lock.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{url}: another process has been fetching it for {_FETCH_SECONDS / 3600:g} hours",
                        hint=f"end the process that holds {lock}",
                    ) from error
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _fetch(url: str, *, to: Path, max_cache_bytes: int) -> None:
    """Copy the files of `url` into the directory `to`, which appears complete or not at all."""
    partial = to.parent / f"{_PARTIAL}{to.name}"
    try:
        files, start = fsspec.core.url_to_fs(url)
        sizes = {start: files.size(start)} if files.isfile(start) else files.find(start, detail=True)
        sizes = {path: entry if isinstance(entry, int) else int(entry["size"] or 0) for path, entry in sizes.items()}
        _make_room(to.parent, num_bytes=sum(sizes.values()), max_cache_bytes=max_cache_bytes, url=url)
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        for path in sizes:
            relative = PurePosixPath(
                PurePosixPath(path).name if path == start else path.removeprefix(start).lstrip("/")
            )
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointError(f"{url}: the store names a file {path!r}, which lies outside of the model")
            local = partial / relative
            local.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(path, str(local))
        partial.rename(to)
    except OSError as error:
        raise CheckpointError(f"{url}: cannot be fetched: {error}", hint="try again; nothing was kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_room(cache: Path, *, num_bytes: int, max_cache_bytes: int, url: str) -> None:
    """Remove the copies that were not used for longest until so many bytes fit."""
    complete = (path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(_PARTIAL))
    copies = sorted(complete, key=lambda path: path.stat().st_mtime)
    taken = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in copies}

    def is_short() -> bool:
        is_full = sum(taken.values()) + num_bytes > max_cache_bytes
        return is_full or shutil.disk_usage(cache).free < num_bytes + _LEFT_FREE_BYTES

    while taken and is_short():
        oldest = next(iter(taken))
        shutil.rmtree(oldest, ignore_errors=True)
        del taken[oldest]
    if is_short():
        free = shutil.disk_usage(cache).free
        raise CheckpointError(
            f"{url}: {num_bytes / 1e9:.3f} GB do not fit into {cache}: "
            f"at most {max_cache_bytes / 1e9:.3f} GB are kept, {free / 1e9:.1f} GB are free",
            hint="copy the model to a disk that holds it, and name that path",
        )


def _inside(kept: Path, *, url: str) -> Path:
    """The file itself where the URL was one of a file."""
    only = list(kept.iterdir())
    return only[0] if len(only) == 1 and only[0].is_file() and only[0].name == PurePosixPath(url).name else kept
