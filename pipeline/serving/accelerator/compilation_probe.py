"""A process that answers one question: does jax find in the cache what another process compiled?

Owns that process and the call that starts it. The one decision: the answer comes from doing it, because on some
processors XLA:CPU writes entries that it then never accepts (its tuning flags are taken for missing features).
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

TIMEOUT_SECONDS = 60.0
_HIT, _MISS, _WRONG = 0, 3, 4
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_ROWS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBack:
    """Whether the cache can be used, and how that is known."""

    is_usable: bool
    reason: str
    is_final: bool
    """False where the question was not answered, and should be asked again at the next start."""


def set_cache(directory: str, *, platform: str, is_writer: bool, max_bytes: int) -> None:
    """Point jax at the directory; what it compiles is written where `is_writer`, and else only read."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", directory)
    # jax's own removal of what was not read for longest; it also makes each read and write hold a file lock.
    jax.config.update("jax_compilation_cache_max_size", max_bytes)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if platform == "cpu":
        # The paths of XLA's own GPU caches are part of each entry's key: a store that was moved would hit nothing.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # The default keeps only what took over a second to compile. Nothing takes an hour: a reader writes nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if is_writer else 3600.0)
    # jax decides once whether and where it caches; a process may have compiled before, without.
    reset_cache()


def unset_cache() -> None:
    """Neither read nor write from now on."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()


def read_back(directory: Path, *, platform: str, max_bytes: int) -> ReadBack:
    """Compile a small function here, with the cache on, and ask a child with the same settings for it."""
    _probe(platform)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # jax takes "gpu" for every kind of GPU, and fails where one kind is not installed.
        "JAX_PLATFORMS": "cuda" if platform == "gpu" else platform,
        # A second process on the device must not ask for a share of its memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [
        sys.executable,
        "-m",
        "pipeline.serving.accelerator.compilation_probe",
        str(directory),
        platform,
        str(max_bytes),
    ]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ReadBack(is_usable=False, reason=f"a child gave no answer in {TIMEOUT_SECONDS:g} s", is_final=False)
    if done.returncode == _HIT:
        return ReadBack(is_usable=True, reason="a child process found what this one compiled", is_final=True)
    if done.returncode == _MISS:
        return ReadBack(
            is_usable=False,
            reason="a child process with the same settings compiled again what this one had written"
            + (f": {_last_line(done.stderr)}" if done.stderr.strip() else ""),
            is_final=True,
        )
    if done.returncode == _WRONG:
        reason = "what a child process loaded from the cache computed other numbers"
        return ReadBack(is_usable=False, reason=reason, is_final=True)
    return ReadBack(
        is_usable=False,
        reason=f"a child process ended with {done.returncode}: {_last_line(done.stderr) or 'it said nothing'}",
        is_final=False,
    )


def _probe(platform: str) -> bool:
    """Compile and run the function; whether its numbers are right."""
    with jax.default_device(jax.local_devices(backend=platform)[0]):
        given = np.arange(_ROWS * _ROWS, dtype=np.float32).reshape(_ROWS, _ROWS) / _ROWS
        # A product, a gather and a reduction: what tuning flags of a processor change.
        computed = jax.jit(lambda x: (x @ x.T)[np.arange(0, _ROWS, 2)].sum(axis=1))(given)
        wanted = (given @ given.T)[::2].sum(axis=1)
        return bool(np.allclose(np.asarray(computed), wanted, rtol=1e-2))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def main() -> int:
    """The child: its exit status is the answer."""
    directory, platform, max_bytes = sys.argv[1:]
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event == _CACHE_HIT else None)
    set_cache(directory, platform=platform, is_writer=False, max_bytes=int(max_bytes))
    if not _probe(platform):
        return _WRONG
    return _HIT if hits else _MISS


if __name__ == "__main__":
    sys.exit(main())
