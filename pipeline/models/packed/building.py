"""The custom calls' library, compiled on the machine that uses it.

Owns the compiler's command and where its result is kept. Knows nothing of jax's arrays. The one decision: one library
for each content of sources, headers and compiler, made once a user and machine under a lock and put in place by a
rename; where it cannot be made, the reason is a value, because XLA's own products compute the same.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock

SOURCES = tuple(Path(__file__).with_name(name) for name in ("product.cc", "attention.cc", "helpers.h"))
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """What compiling gave."""

    path: Path | None
    """None where there is none."""
    digest: str
    """Of sources, headers and compiler."""
    reason: str
    """In words, either way."""


def build(directory: Path, *, headers: Path, environment: Mapping[str, str]) -> Library:
    """Compile the sources into `directory`, or find it there.

    Args:
        directory: of this user; made where it is absent.
        headers: jax's, `jax.ffi.include_dir()`.
        environment: `CXX` names the compiler; where it is no program (`ccache g++` is two words), it is the first of
            `c++`, `g++`, `clang++` in `PATH`.
    """
    asked = environment.get("CXX") or None
    names = ((asked,) if asked else ()) + _COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name, path=environment.get("PATH")))), None)
    if compiler is None:
        return Library(path=None, digest="", reason=f"no C++ compiler ({', '.join(names)}) is installed")
    try:
        digest = _digest(compiler, headers)
        return _made(directory / f"custom-calls-{digest}.so", compiler=compiler, headers=headers, digest=digest)
    except (OSError, subprocess.SubprocessError, filelock.Timeout) as error:
        said = getattr(error, "stderr", "") or str(error)
        return Library(path=None, digest="", reason=f"{compiler} did not compile it: {said.strip()[-300:]}")


def _made(path: Path, *, compiler: str, headers: Path, digest: str) -> Library:
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_TIMEOUT_SECONDS):
            if not path.is_file():
                _compile(path, compiler=compiler, headers=headers)
    return Library(path=path, digest=digest, reason=f"compiled by {Path(compiler).name}")


def _compile(path: Path, *, compiler: str, headers: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=path.stem, suffix=".partial", dir=path.parent)
    os.close(descriptor)
    units = [str(source) for source in SOURCES if source.suffix == ".cc"]
    try:
        subprocess.run(
            [compiler, *_FLAGS, "-isystem", str(headers), *units, "-o", name],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _digest(compiler: str, headers: Path) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30.0).stdout
    contents = [header.read_bytes() for header in sorted(headers.glob("xla/ffi/api/*.h"))]
    hashed = hashlib.sha256()
    for part in (*(source.read_bytes() for source in SOURCES), version, " ".join(_FLAGS).encode(), *contents):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()[:16]
