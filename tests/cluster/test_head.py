"""The local head: started, found, stopped, and nothing of it left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.head import Head, find_head, free_port, start_head, stop_head
from pipeline.errors import ClusterError

CPUS = 1


def start(directory: Path) -> Head:
    return start_head(directory, num_cpus=CPUS, environment=lambda _: {"A_MARK": "set"}, die_with_parent=True)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.ray
def test_a_head_is_found_again_and_stopped_with_everything_below_it(tmp_path: Path) -> None:
    head = start(tmp_path)
    assert find_head(tmp_path) == head
    assert head.environment["A_MARK"] == "set"
    assert (tmp_path / "head.json").stat().st_mode & 0o077 == 0, "the note holds the head's token"
    family = [head.pid, *(child.pid for child in psutil.Process(head.pid).children(recursive=True))]
    assert len(family) > 2
    assert stop_head(tmp_path) == head
    assert [pid for pid in family if is_running(pid)] == []
    assert find_head(tmp_path) is None
    assert stop_head(tmp_path) is None


@pytest.mark.ray
def test_what_a_killed_head_leaves_behind_is_ended(tmp_path: Path) -> None:
    head = start(tmp_path)
    family = [head.pid, *(child.pid for child in psutil.Process(head.pid).children(recursive=True))]
    os.kill(head.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while head.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find_head(tmp_path) is None
    assert [pid for pid in family if is_running(pid)] == []


def test_a_note_of_another_process_is_no_head(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = Head(
        address="127.0.0.1:1",
        pid=other.pid,
        process_started_at=1.0,
        temporary_directory="/tmp/nothing-here",
        num_cpus=1,
        started_at=1.0,
        environment={},
    )
    (tmp_path / "head.json").write_text(json.dumps(asdict(note)))
    assert find_head(tmp_path) is None
    assert other.poll() is None, "a process that is not ours must live on"
    other.kill()
    other.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_note_is_no_head(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    assert find_head(tmp_path) is None
    assert not (tmp_path / "head.json").exists()


def test_free_ports_start_where_asked() -> None:
    port = free_port(start=20000)
    assert 20000 <= port < 20200


def test_a_head_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ClusterError, match="ended with code 1"):
        start(tmp_path)
