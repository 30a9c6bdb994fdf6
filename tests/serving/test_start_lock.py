"""Two processes never start on one device at once."""

import subprocess
import sys
import time

import pytest

from pipeline.errors import ClusterError
from pipeline.serving.accelerator.start_lock import starting_alone

STARTER = """
import sys, time
from pathlib import Path
from pipeline.serving.accelerator.start_lock import starting_alone
with starting_alone("GPU-1", who=sys.argv[1], directory=Path(sys.argv[2]), timeout_seconds=30) as waited:
    with open(Path(sys.argv[2]) / "log", "a") as log:
        log.write(f"{sys.argv[1]} in\\n"); log.flush()
        time.sleep(0.3)
        log.write(f"{sys.argv[1]} out\\n")
"""


def start(who, directory):
    return subprocess.Popen([sys.executable, "-c", STARTER, who, str(directory)])


def test_two_processes_start_one_after_the_other(tmp_path):
    both = [start("a", tmp_path), start("b", tmp_path)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    lines = (tmp_path / "log").read_text().split("\n")[:4]
    assert lines in ([f"{who} {what}" for who in order for what in ("in", "out")] for order in ("ab", "ba"))


def test_a_process_that_dies_frees_the_device_and_one_that_hangs_is_named(tmp_path):
    holder = start("chat", tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    said = []
    with (
        pytest.raises(ClusterError, match=r"device GPU-1: chat \(process \d+\) has been starting .* embed waits"),
        starting_alone("GPU-1", who="embed", directory=tmp_path, timeout_seconds=0.01, on_wait=said.append),
    ):
        pass
    assert len(said) == 1 and f"chat (process {holder.pid})" in said[0]
    holder.kill()
    holder.wait(timeout=30)
    with starting_alone("GPU-1", who="embed", directory=tmp_path, timeout_seconds=5):
        pass


def test_other_devices_are_free(tmp_path):
    with (
        starting_alone("GPU-1", who="a", directory=tmp_path),
        starting_alone("MIG-1/2", who="b", directory=tmp_path, timeout_seconds=0) as waited,
    ):
        assert waited < 1
