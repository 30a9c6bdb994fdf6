"""A directory that appears complete or not at all.

Owns the way from a temporary directory to the one that was asked for. Knows nothing of what is in it. The one decision:
what is written lies beside its place until every file is flushed, and then takes it by one rename; nothing that a user
has is ever deleted, overwritten or half written.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import ConversionError, StoreError


def check_free(to: Path) -> None:
    """Hold that `to` does not exist, or is an empty directory.

    Raises:
        ConversionError: it holds something, or is no directory.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConversionError(
            f"{to}: exists and is not empty; nothing is ever overwritten", hint="name a new directory"
        )


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """A directory beside `to` that becomes `to` when the block ends well, and vanishes when it does not.

    Raises:
        ConversionError: `to` holds something already.
        StoreError: the disk refuses to be written: full, read-only, no permission.
    """
    check_free(to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{to.name}.partial-", dir=to.parent))
    except OSError as error:
        raise _not_written(to, error) from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)
        temporary.rename(to)  # takes the place of an empty directory, fails on any other
        _flush(to.parent)
    except OSError as error:
        raise _not_written(to, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _not_written(to: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{to}: cannot be written: {error}; nothing was left behind",
        hint="free some space, or name a directory on another disk",
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
