"""What a source of arrays is, told without reading or importing it.

Owns the forms of a source and the part of its identity that needs no framework; the planner asks on every `plan`. The
one decision: a built-in dataset is identified by its package's version, for the package is where its bytes are.
"""

from importlib import metadata
from pathlib import Path

from pipeline.artifacts.manifest import sha256_of
from pipeline.errors import ParameterError

BUILTIN_DIGITS = "builtin:digits"
_PACKAGE = "scikit-learn"


def is_npz(source: str) -> bool:
    """True for the path of an `.npz` file."""
    return source.endswith(".npz")


def builtin_identity() -> str:
    """Version of the package that ships the built-in datasets.

    Raises:
        ParameterError: it is not installed.
    """
    try:
        return f"{_PACKAGE} {metadata.version(_PACKAGE)}"
    except metadata.PackageNotFoundError as error:
        raise ParameterError(f"source {BUILTIN_DIGITS!r}: {_PACKAGE} is not installed") from error


def file_identity(path: Path) -> str:
    """Digest of a file's content.

    Raises:
        ParameterError: there is no such file.
    """
    try:
        return f"sha256:{sha256_of(path)}"
    except OSError as error:
        raise ParameterError(f"source {path}: cannot be read: {error.strerror}") from error
