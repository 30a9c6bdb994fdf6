"""jax's persistent compile cache, kept in the store's state directory.

Owns which directory a process may use (one for each jaxlib build, device and set of flags), who may write to it, and
what is said of its effect. The one decision: the cache is used only where a child process has shown that this machine
reads back what it writes; else the replica compiles, and says why.
"""

import contextlib
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.monitoring
import jaxlib

from pipeline.serving.accelerator import compilation_entries as files
from pipeline.serving.accelerator.compilation_probe import ReadBack, read_back, set_cache, unset_cache
from pipeline.serving.accelerator.records import read_record, write_record

_LOG = logging.getLogger(__name__)
MAX_BYTES = 2 * 2**30
"""Of one directory; what was read longest ago goes first. SmolLM2-135M's executables take 10 MB."""
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_LIBRARY = "libjax_common.so"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCounts:
    """Of one start."""

    compiled: int
    from_cache: int


class CompilationCache:
    """The cache while something starts."""

    def __init__(self, directory: Path, *, found: ReadBack, is_writer: bool) -> None:
        self._directory = directory
        self._found = found
        self._is_writer = is_writer
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_hits = 0
        self._started = time.monotonic()

    @property
    def is_usable(self) -> bool:
        """True where compiles are looked up."""
        return self._found.is_usable

    @property
    def counts(self) -> CompileCounts:
        """Since the cache was opened."""
        with self._lock:
            return CompileCounts(compiled=self._num_requests - self._num_hits, from_cache=self._num_hits)

    def facts(self, *, what: str) -> Mapping[str, Any]:
        """What the cache did for a start that has ended, for `/health` and the stage.

        Args:
            what: identifies what was started (model and settings), so that a warm start is held against the cold one
                of the same.
        """
        seconds, counts = time.monotonic() - self._started, self.counts
        record = self._directory / f"start-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
        cold = read_record(record).get("cold_seconds")
        if self._is_writer and self.is_usable and counts.compiled and not counts.from_cache:
            write_record(record, {"cold_seconds": seconds, "executables": counts.compiled})
            cold = None
        return {
            "compile_cache_usable": self.is_usable,
            "compile_cache_reason": self._found.reason,
            "compile_cache_role": "writer" if self._is_writer else "reader",
            "compile_cache": said(counts, seconds=seconds, cold_seconds=cold),
            "executables_compiled": counts.compiled,
            "executables_from_cache": counts.from_cache,
        }

    def on_event(self, event: str, **_: Any) -> None:
        """Of jax: count."""
        if event in (_REQUEST, _HIT):
            with self._lock:
                self._num_requests += event == _REQUEST
                self._num_hits += event == _HIT


@contextlib.contextmanager
def compilation_cache(root: Path, *, device: Any, max_bytes: int = MAX_BYTES) -> Iterator[CompilationCache]:
    """Look up below `root` what this process compiles for a device of this kind, and write what is not there.

    After the block the process still reads; what was written is sealed, and another process may write.

    Args:
        root: a directory of this user alone; created where it is missing.
        device: of jax.
        max_bytes: that the entries of this kind may take.

    Raises:
        ParameterError: others can write to the directory.
    """
    files.make_private(root)
    identity = cache_identity(root, device=device)
    directory = root / hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:16]
    files.make_private(directory)
    with _only_writer(directory) as is_writer:
        if is_writer:
            files.sweep(directory)
            write_record(directory / "identity.json", identity)
        set_cache(str(directory), platform=device.platform, is_writer=is_writer, max_bytes=max_bytes)
        found = _checked(directory, is_writer=is_writer, platform=device.platform, max_bytes=max_bytes)
        if not found.is_usable:
            _LOG.warning("%s: the compile cache is not used: %s", directory, found.reason)
            unset_cache()
        cache = CompilationCache(directory, found=found, is_writer=is_writer)
        jax.monitoring.register_event_listener(cache.on_event)
        try:
            yield cache
        finally:
            jax.monitoring.unregister_event_listener(cache.on_event)
            if is_writer:
                files.seal(directory)
                if found.is_usable:
                    set_cache(str(directory), platform=device.platform, is_writer=False, max_bytes=max_bytes)


@contextlib.contextmanager
def started_with_cache(root: str | None, *, device: Any) -> Iterator[CompilationCache | None]:
    """As `compilation_cache`; None where there is no directory for one.

    Raises:
        ParameterError: others can write to the directory.
    """
    if root is None:
        yield None
        return
    with compilation_cache(Path(root), device=device) as cache:
        yield cache


def cache_identity(root: Path, *, device: Any) -> dict[str, str]:
    """What machine code depends on beyond the program: build, device, processor, flags; by name."""
    library = Path(jaxlib.__file__).parent / _LIBRARY
    return {
        "jaxlib": jaxlib.__version__,
        "jaxlib_binary": files.binary_digest(library, remembered=root),
        "backend": f"{device.platform} {device.client.platform_version}",
        "device_kind": device.device_kind,
        "processor": f"{platform.machine()} {_processor_flags()}",
        **{name: os.environ.get(name, "") for name in _FLAGS},
    }


def said(counts: CompileCounts, *, seconds: float, cold_seconds: float | None) -> str:
    """In words, for people."""
    text = f"compiled {counts.compiled} executables, {counts.from_cache} from the cache, {seconds:.1f} s"
    return text if cold_seconds is None else f"{text} (without the cache {cold_seconds:.1f} s)"


@contextlib.contextmanager
def _only_writer(directory: Path) -> Iterator[bool]:
    """True in the one process that may write, until it is warm."""
    # The system drops the lock with its process: a killed writer leaves nothing behind.
    lock = filelock.FileLock(directory / "writer.lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _checked(directory: Path, *, is_writer: bool, platform: str, max_bytes: int) -> ReadBack:
    record = directory / "read-back.json"
    known = read_record(record)
    if "is_usable" in known:
        return ReadBack(is_usable=bool(known["is_usable"]), reason=str(known["reason"]), is_final=True)
    if not is_writer:
        return ReadBack(is_usable=True, reason="another replica is writing it; not checked yet", is_final=False)
    found = read_back(directory, platform=platform, max_bytes=max_bytes)
    if found.is_final:
        write_record(record, {"is_usable": found.is_usable, "reason": found.reason})
    return found


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
