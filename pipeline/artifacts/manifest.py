"""The files of an artifact: names, sizes, sha256, and one digest over them.

Pure but for reading the files it lists. The one decision: the digest covers relative names and contents only, so the
same bytes have the same digest wherever they lie.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file; `path` is relative to its output's directory, with `/`."""

    path: str
    size: int
    sha256: str


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Every file under `directory`, sorted by path."""
    return tuple(
        FileEntry(path=path.relative_to(directory).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )


def digest_of(files: Iterable[FileEntry]) -> str:
    """Hex sha256 over the sorted lines `path NUL sha256 LF`."""
    digest = hashlib.sha256()
    for entry in sorted(files, key=lambda entry: entry.path):
        digest.update(f"{entry.path}\0{entry.sha256}\n".encode())
    return digest.hexdigest()
