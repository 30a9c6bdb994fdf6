"""The files of a compile cache: whose they are, whether they are whole, and what was measured with them.

Owns the directory's permissions, the seal (a sha256 for each entry) and the records beside the entries. Knows nothing
of jax but the names of its entries. The one decision: machine code is only loaded from a directory that no other user
writes to, and only where its bytes are those that were sealed.
"""

import contextlib
import hashlib
import logging
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ParameterError
from pipeline.serving.accelerator.records import read_record, write_record

_LOG = logging.getLogger(__name__)
ENTRY_SUFFIX = "-cache"
ACCESS_SUFFIX = "-atime"
"""jax's own: beside each entry, when it was last read."""
SEAL_FILE = "seal.json"
BINARY_FILE = "binaries.json"
_BLOCK_BYTES = 2**20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path) -> None:
    """Create the directory for this user alone, or check that it is one that nobody else writes to.

    Raises:
        ParameterError: it belongs to another user, others can write to it, or it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ParameterError(
            f"{directory}: the compile cache cannot be made: {error}", hint="use a state directory you can write to"
        ) from error
    whose = "another user" if found.st_uid != os.geteuid() else ""
    mode = stat.S_IMODE(found.st_mode)
    if whose or mode & _WRITABLE_BY_OTHERS:
        raise ParameterError(
            f"{directory}: the compile cache holds machine code, but "
            + (f"it belongs to user {found.st_uid}, not to {os.geteuid()}" if whose else f"its mode {mode:04o} lets ")
            + ("" if whose else "others write to it"),
            hint=f"`chmod 700 {directory}` after making sure of what is in it, or remove it",
        )


def sweep(directory: Path) -> list[str]:
    """Remove entries that are not whole; their names. Only the one writer may call this.

    An entry is whole when its bytes have the sealed sha256. One that a writer left unsealed (it was killed) is kept
    where it can be unpacked to its end.
    """
    sealed = read_record(directory / SEAL_FILE)
    removed = []
    for entry in entries(directory):
        content = entry.read_bytes()
        known = sealed.get(entry.name)
        if known is None:
            reason = "" if _unpacks(content) else "was cut off while it was written"
        else:
            reason = "" if hashlib.sha256(content).hexdigest() == known else "does not have the bytes that were written"
        if not reason and not _access_file(entry).is_file():
            reason = "has no access time, which jax's removal needs"
        if reason:
            _LOG.warning("%s: %s; it is removed and compiled again", entry, reason)
            _access_file(entry).unlink(missing_ok=True)
            entry.unlink()
            removed.append(entry.name)
    return removed


def seal(directory: Path) -> None:
    """Write down the sha256 of every entry. Only the one writer may call this."""
    write_record(
        directory / SEAL_FILE,
        {entry.name: hashlib.sha256(entry.read_bytes()).hexdigest() for entry in entries(directory)},
    )


def entries(directory: Path) -> Iterator[Path]:
    """The entries there are now, by name."""
    return iter(sorted(path for path in directory.glob(f"*{ENTRY_SUFFIX}") if path.is_file()))


def binary_digest(path: Path, *, remembered: Path) -> str:
    """sha256 of a library, which is read again only where its size or time changed.

    Args:
        path: of the library; 350 MB take 0.5 s.
        remembered: directory that keeps the digests.
    """
    found = path.stat()
    key = f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    known = read_record(remembered / BINARY_FILE)
    if key not in known:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        known = {key: digest.hexdigest()}
        write_record(remembered / BINARY_FILE, known)
    return str(known[key])


def _access_file(entry: Path) -> Path:
    return entry.with_name(entry.name.removesuffix(ENTRY_SUFFIX) + ACCESS_SUFFIX)


def _unpacks(content: bytes) -> bool:
    with contextlib.suppress(zlib.error):
        unpacker = zlib.decompressobj()
        unpacker.decompress(content)
        return unpacker.eof
    return False
