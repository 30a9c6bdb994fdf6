"""Text behind an fsspec URL.

Owns listing, reading and the digest of remote files. Knows nothing of documents. The one decision: a remote file's
identity is what its store says of it (etag, checksum, size, time), so that planning never downloads a corpus.
"""

import glob
import hashlib
from collections.abc import Iterator

import fsspec

from pipeline.artifacts.driver_errors import as_os_errors
from pipeline.errors import ParameterError

_VERSION_KEYS = ("etag", "md5", "sha256", "generation", "version_id", "mtime", "lastmodified", "created", "size")
"""Fields of `fs.info` (lower case, no separators) that change when the content does."""


def contents(source: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, ordered by name.

    Raises:
        ParameterError: the store cannot be opened or holds no such file.
    """
    filesystem, files = _list(source)
    for name, path in files:
        try:
            with as_os_errors():
                content = filesystem.cat_file(path)
        except OSError as error:
            raise ParameterError(f"source {source!r}: {path} cannot be read: {error}") from error
        yield name, content


def read_file(url: str) -> bytes:
    """The bytes of one file.

    Raises:
        ParameterError: the store cannot be opened, or has no such file.
    """
    try:
        with as_os_errors():
            filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
            return bytes(filesystem.cat_file(path))
    except (OSError, ValueError, ImportError) as error:
        raise ParameterError(
            f"{url}: cannot be read: {type(error).__name__}: {error}",
            hint="check the URL and the credentials; some schemes need a package (s3fs for s3://, gcsfs for gs://)",
        ) from error


def digest(source: str) -> str:
    """Digest over names and what the store says of each file.

    Raises:
        ParameterError: the store cannot be opened or holds no such file.
    """
    filesystem, files = _list(source)
    hasher = hashlib.sha256()
    for name, path in files:
        try:
            with as_os_errors():
                said = _identity(filesystem, path)
        except OSError as error:
            raise ParameterError(f"source {source!r}: {path} cannot be looked at: {error}") from error
        hasher.update(f"{name}\0{said}\0".encode())
    return f"remote-sha256:{hasher.hexdigest()}"


def _identity(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    info = filesystem.info(path)
    known = {key.lower().replace("-", "").replace("_", ""): value for key, value in info.items()}
    return repr([(key, str(known[key.replace("_", "")])) for key in _VERSION_KEYS if key.replace("_", "") in known])


def _list(source: str) -> tuple[fsspec.AbstractFileSystem, list[tuple[str, str]]]:
    try:
        with as_os_errors():
            filesystem, root = fsspec.core.url_to_fs(source)
            filesystem.invalidate_cache()
            if glob.has_magic(root):
                paths = [path for path in filesystem.glob(root) if filesystem.isfile(path)]
            elif filesystem.isfile(root):
                paths = [root]
            else:
                paths = filesystem.find(root)
    except (OSError, ValueError, ImportError) as error:
        raise ParameterError(
            f"source {source!r}: cannot be opened: {error}",
            hint="check the URL and the credentials; some schemes need a package (s3fs for s3://, gcsfs for gs://)",
        ) from error
    if not paths:
        raise ParameterError(f"source {source!r}: no such file", hint="name a file, a directory or a glob of the store")
    fixed = root.split("*")[0].split("?")[0].split("[")[0] if glob.has_magic(root) else root
    prefix = fixed.rsplit("/", 1)[0] if glob.has_magic(root) or paths == [root] else fixed.rstrip("/")
    return filesystem, sorted((path.removeprefix(prefix).lstrip("/"), path) for path in paths)
