"""The compile cache is private, whole, written by one, and only used where it is read back."""

import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import filelock
import jax
import pytest

from pipeline.errors import ParameterError
from pipeline.serving.accelerator import compilation_entries as files
from pipeline.serving.accelerator.compilation_cache import CompileCounts, cache_identity, said

SCRIPT = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from pathlib import Path
import jax, numpy as np
from pipeline.serving.accelerator import compilation_probe
from pipeline.serving.accelerator.compilation_cache import compilation_cache
root, max_bytes, sizes, damaged = json.loads(sys.argv[1])
if damaged:  # behind the sweep's back, as a disk does it
    import pipeline.serving.accelerator.compilation_entries as files
    files.sweep = lambda directory: []
with compilation_cache(Path(root), device=jax.local_devices()[0], max_bytes=max_bytes) as cache:
    numbers = [float(jax.jit(lambda x: (x @ x.T).sum() * n)(np.ones((n, n + 1), np.float32))) for n in sizes]
    facts = dict(cache.facts(what="test"))
jax.jit(lambda x: x * 3)(np.ones(7, np.float32))  # after the block: nothing is written
print(json.dumps([numbers, facts]))
"""
SIZES = [3, 4, 5]
NUMBERS = [float(n * n * (n + 1) * n) for n in SIZES]
LARGE = 2**30


def start(root, *, max_bytes=LARGE, sizes=SIZES, damaged=False):
    """A process that compiles with the cache; its numbers, facts and log."""
    given = json.dumps([str(root), max_bytes, sizes, damaged])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    numbers, facts = json.loads(done.stdout.splitlines()[-1])
    return numbers, facts, done.stderr


def entries_of(root):
    return sorted(root.glob("*/*-cache"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache after its first start, and what that said. Tests copy it."""
    root = tmp_path_factory.mktemp("caches") / "cache"
    return root, start(root)


@pytest.fixture
def cache(filled, tmp_path):
    root = tmp_path / "cache"
    # Not shutil.copytree: it would keep the mode, but not of a root that exists.
    subprocess.run(["cp", "-a", str(filled[0]), str(root)], check=True)
    return root


def test_the_first_start_shows_that_a_child_reads_back_what_it_wrote(filled):
    root, (numbers, facts, _) = filled
    assert numbers == NUMBERS
    assert facts["compile_cache_usable"] and "child process found" in facts["compile_cache_reason"]
    assert (facts["executables_compiled"], facts["executables_from_cache"]) == (3, 0)
    (record,) = root.glob("*/read-back.json")
    assert json.loads(record.read_text())["is_usable"] is True
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_second_start_compiles_nothing_and_is_held_against_the_first(cache):
    written = entries_of(cache)
    assert len(written) == 4  # and the probe's
    numbers, facts, _ = start(cache)
    assert numbers == NUMBERS
    assert (facts["executables_compiled"], facts["executables_from_cache"]) == (0, 3)
    assert "compiled 0 executables, 3 from the cache" in facts["compile_cache"]
    assert "without the cache" in facts["compile_cache"]
    assert entries_of(cache) == written


def test_damaged_entries_are_removed_with_a_word_and_compiled_again(cache):
    cut, foreign, *_ = entries_of(cache)
    cut.write_bytes(cut.read_bytes()[:500])
    foreign.write_bytes(zlib.compress(b"not machine code" * 50))
    numbers, facts, log = start(cache)
    assert numbers == NUMBERS
    assert facts["executables_compiled"] + facts["executables_from_cache"] == 3
    assert facts["executables_compiled"] >= 1
    assert cut.name in log and foreign.name in log and "compiled again" in log


def test_jax_itself_compiles_again_where_an_entry_is_bad_bytes(cache):
    """What stands between a bad disk and a crash when bytes change after the sweep."""
    for entry, content in zip(entries_of(cache), (b"", b"hello", zlib.compress(b"x" * 900), b"\x00" * 99), strict=True):
        entry.write_bytes(content)
    numbers, facts, log = start(cache, damaged=True)
    assert numbers == NUMBERS
    assert facts["executables_from_cache"] == 0
    assert "Error reading persistent compilation cache entry" in log


def test_only_one_process_writes_and_the_others_read(cache):
    (directory,) = [path for path in cache.iterdir() if path.is_dir()]
    before = entries_of(cache)
    with filelock.FileLock(directory / "writer.lock"):
        numbers, facts, _ = start(cache, sizes=[*SIZES, 6])
    assert numbers[:3] == NUMBERS
    assert facts["compile_cache_role"] == "reader"
    assert (facts["executables_compiled"], facts["executables_from_cache"]) == (1, 3)
    assert entries_of(cache) == before


def test_what_was_read_longest_ago_goes_when_the_cap_is_reached(cache):
    cap = sum(path.stat().st_size for path in entries_of(cache))

    def read_at(entry):
        return entry.with_name(entry.name.replace("-cache", "-atime")).read_bytes()

    before = {entry: read_at(entry) for entry in entries_of(cache)}
    # The first is read again; the two that are new push out others.
    numbers, facts, _ = start(cache, max_bytes=cap, sizes=[3, 6, 7])
    assert numbers == [float(n * n * (n + 1) * n) for n in (3, 6, 7)]
    assert facts["executables_from_cache"] == 1 and facts["compile_cache_role"] == "writer"
    left = set(entries_of(cache))
    assert sum(path.stat().st_size for path in left) <= cap
    kept = left & before.keys()
    assert len(left - kept) == 2 and len(kept) in (1, 2)
    assert sum(read_at(entry) != before[entry] for entry in kept) == 1, "what was just read stays"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, mode):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ParameterError, match=rf"mode 0{mode:o} lets others write to it.*\n.*chmod 700"):
        files.make_private(root)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ParameterError, match="belongs to user"):
        files.make_private(tmp_path)


def test_unsealed_entries_of_a_killed_writer_are_kept_where_they_are_whole(tmp_path):
    whole, cut, sealed = (tmp_path / f"{name}-cache" for name in ("whole", "cut", "sealed"))
    packed = zlib.compress(os.urandom(2000))
    sealed.write_bytes(packed)
    files.seal(tmp_path)
    whole.write_bytes(packed)
    cut.write_bytes(packed[:-1])
    for entry in (whole, cut, sealed):
        (tmp_path / entry.name.replace("-cache", "-atime")).write_bytes(bytes(8))
    assert files.sweep(tmp_path) == ["cut-cache"]
    sealed.write_bytes(packed + b"x")
    (tmp_path / "whole-atime").unlink()
    assert files.sweep(tmp_path) == ["sealed-cache", "whole-cache"]
    assert list(tmp_path.glob("*-atime")) == []


def test_another_build_device_or_flag_has_a_directory_of_its_own(tmp_path, monkeypatch):
    device = jax.local_devices()[0]
    here = cache_identity(tmp_path, device=device)
    assert here["device_kind"] == device.device_kind and len(here["jaxlib_binary"]) == 64
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    assert cache_identity(tmp_path, device=device) != here


def test_a_library_is_read_again_only_where_it_changed(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"one")
    assert files.binary_digest(library, remembered=tmp_path) == hashlib.sha256(b"one").hexdigest()
    (tmp_path / files.BINARY_FILE).write_text(
        (tmp_path / files.BINARY_FILE).read_text().replace(hashlib.sha256(b"one").hexdigest(), "remembered")
    )
    assert files.binary_digest(library, remembered=tmp_path) == "remembered"
    library.write_bytes(b"other")
    assert files.binary_digest(library, remembered=tmp_path) == hashlib.sha256(b"other").hexdigest()


def test_the_words_name_both_starts():
    counts = CompileCounts(compiled=2, from_cache=9)
    assert said(counts, seconds=4.04, cold_seconds=21.3) == (
        "compiled 2 executables, 9 from the cache, 4.0 s (without the cache 21.3 s)"
    )
    assert "without" not in said(counts, seconds=4.04, cold_seconds=None)
