"""Where text comes from: the standard library, a file, a glob, a directory, an fsspec URL, a field of JSON Lines.

Owns the way from a source's name to bytes and documents, and the digest that the planner takes as the source's
identity. Knows nothing of tokens. The one decision: local sources need only the standard library, because the planner
calls `digests` on every `plan`; fsspec is loaded for URLs alone.
"""

import glob
import hashlib
import importlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pipeline.data.document import Document
from pipeline.data.json_lines import Render, documents_of_lines
from pipeline.errors import ParameterError

REMOTE_BACKEND = "pipeline.data.remote"
"""By name, for fsspec costs 0.13 s to import, and `plan` over local sources does not need it."""

STDLIB = "stdlib"
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "turtledemo", "__pycache__"}
)
_MACHINE_FILE_PREFIX = "_sysconfigdata"
"""Written by the interpreter's build and different on each machine."""


class TextParameters(Protocol):
    """The two parameters that say what is read."""

    @property
    def source(self) -> str:
        """`stdlib`, a path, a glob, a directory or a URL."""
        ...

    @property
    def json_field(self) -> str | None:
        """Field of each JSON line that is the document, or None for plain text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of a local source."""

    name: str
    """Relative to the source, with forward slashes."""
    path: Path


def is_remote(source: str) -> bool:
    """True for fsspec URLs other than `file://`."""
    return "://" in source and urlsplit(source).scheme != "file"


def digests(parameters: TextParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of what the source would be read as now, under the key `source`.

    Local files are hashed (names and contents); for URLs the store's own checksums are taken.

    Raises:
        ParameterError: the source does not exist or is empty.
    """
    if is_remote(parameters.source):
        return {"source": _remote_digest(parameters.source)}
    hasher = hashlib.sha256()
    for file in local_files(parameters.source, project_root):
        content = _read(file)
        hasher.update(f"{file.name}\0{len(content)}\0".encode())
        hasher.update(content)
    return {"source": f"sha256:{hasher.hexdigest()}"}


def read_documents(
    parameters: TextParameters, project_root: Path, *, render: Render | None = None
) -> Iterator[Document]:
    """Every document of the source, ordered by file name and line.

    Args:
        parameters: what is read.
        project_root: where relative paths start.
        render: makes one text of the messages of a JSON line; there are none where it is None.

    Raises:
        ParameterError: the source does not exist or is empty, is not UTF-8, or a JSON line lacks the field; names the
            file and the line.
    """
    is_stdlib = parameters.source == STDLIB
    found = False
    for name, content in _contents(parameters.source, project_root):
        text = _decode_python(content) if is_stdlib else _decode(name, content)
        if parameters.json_field is not None:
            documents: Iterator[Document] = documents_of_lines(name, text, field=parameters.json_field, render=render)
        else:
            documents = iter([Document(name=name, text=text)])
        for document in documents:
            if document.text.strip():
                found = True
                yield document
    if not found:
        raise ParameterError(
            f"source {parameters.source!r}: every file is empty",
            hint="point `source` at files that hold text, or use `stdlib`",
        )


def local_files(source: str, project_root: Path) -> list[SourceFile]:
    """The files of a local source, ordered by name.

    Raises:
        ParameterError: nothing is there.
    """
    if source == STDLIB:
        return _stdlib_files()
    plain = urlsplit(source).path if source.startswith("file://") else source
    path = project_root / Path(plain).expanduser()
    if path.is_file():
        return [SourceFile(name=path.name, path=path)]
    if path.is_dir():
        files = _named([item for item in path.rglob("*") if _is_visible_file(item, path)], root=path)
        if not files:
            raise ParameterError(
                f"source {source!r}: the directory {path} holds no file", hint="hidden files are skipped"
            )
        return files
    if glob.has_magic(plain):
        matched = [Path(item) for item in glob.glob(str(path), recursive=True) if Path(item).is_file()]  # noqa: PTH207 - Path.glob refuses absolute patterns
        if not matched:
            raise ParameterError(
                f"source {source!r}: no file matches {path}",
                hint="`*` stays inside one directory, `**` crosses directories",
            )
        return _named(matched, root=_fixed_prefix(path))
    raise ParameterError(
        f"source {source!r}: no such file or directory: {path}",
        hint=f"relative paths start from {project_root}; allowed: {STDLIB!r}, a file, a glob, a directory, a URL such "
        "as s3://bucket/text",
    )


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _STDLIB_SKIPPED]
        found += [
            Path(directory, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_MACHINE_FILE_PREFIX)
        ]
    if not found:
        raise ParameterError(
            f"source {STDLIB!r}: no .py file under {root}",
            hint="this interpreter ships without the source of its library; name a file or a directory instead",
        )
    return _named(found, root=root)


def _named(paths: list[Path], *, root: Path) -> list[SourceFile]:
    files = [SourceFile(name=path.relative_to(root).as_posix(), path=path) for path in paths]
    return sorted(files, key=lambda file: file.name)


def _is_visible_file(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)


def _fixed_prefix(pattern: Path) -> Path:
    fixed = [part for part in pattern.parents if not glob.has_magic(str(part))]
    return fixed[0]


def _contents(source: str, project_root: Path) -> Iterator[tuple[str, bytes]]:
    if is_remote(source):
        yield from importlib.import_module(REMOTE_BACKEND).contents(source)
        return
    for file in local_files(source, project_root):
        yield file.name, _read(file)


def _remote_digest(source: str) -> str:
    digest: str = importlib.import_module(REMOTE_BACKEND).digest(source)
    return digest


def _read(file: SourceFile) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise ParameterError(
            f"source file {file.path}: cannot be read ({error.strerror})", hint="check its permissions"
        ) from error


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ParameterError(
            f"{name}:{line}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})",
            hint="convert the file to UTF-8, or leave it out with a glob such as docs/**/*.txt",
        ) from error


def _decode_python(content: bytes) -> str:
    """Decode as PEP 263 says, which is right for every file an interpreter can import."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding)
