"""One holder at a time; a dead one is succeeded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.artifacts.store import open_store
from pipeline.errors import LeaseError
from pipeline.execution.leases import LEASE_SECONDS, Holder, Leases


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(tmp_path: Path, clock: Clock, *, holder: Holder | None = None) -> Leases:
    return Leases(open_store(str(tmp_path)), holder=holder or Holder.current(), clock=clock)


ELSEWHERE = Holder(host="another-machine", pid=1, process_started_at=0.0)


def test_a_held_name_is_refused_until_it_expires(tmp_path: Path) -> None:
    clock = Clock()
    theirs = make(tmp_path, clock, holder=ELSEWHERE)
    ours = make(tmp_path, clock)
    first = theirs.acquire("runs/a")
    assert first is not None
    assert ours.acquire("runs/a") is None
    clock.now += LEASE_SECONDS + 1
    second = ours.acquire("runs/a")
    assert second is not None
    assert second.number == first.number + 1


def test_a_renewed_lease_does_not_expire(tmp_path: Path) -> None:
    clock = Clock()
    theirs = make(tmp_path, clock, holder=ELSEWHERE)
    lease = theirs.acquire("runs/a")
    assert lease is not None
    for _ in range(5):
        clock.now += LEASE_SECONDS / 2
        lease = theirs.renew(lease)
    assert make(tmp_path, clock).acquire("runs/a") is None


def test_a_released_name_is_free_at_once(tmp_path: Path) -> None:
    clock = Clock()
    theirs = make(tmp_path, clock, holder=ELSEWHERE)
    lease = theirs.acquire("runs/a")
    assert lease is not None
    theirs.release(lease)
    assert make(tmp_path, clock).acquire("runs/a") is not None


def test_a_dead_process_of_this_machine_is_succeeded_without_waiting(tmp_path: Path) -> None:
    clock = Clock()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    current = Holder.current()
    import psutil

    dead = replace(current, pid=child.pid, process_started_at=psutil.Process(child.pid).create_time())
    assert make(tmp_path, clock, holder=dead).acquire("runs/a") is not None
    assert make(tmp_path, clock).acquire("runs/a") is None
    child.kill()
    child.wait()
    assert make(tmp_path, clock).acquire("runs/a") is not None


def test_a_reused_process_id_is_not_the_holder(tmp_path: Path) -> None:
    clock = Clock()
    impostor = replace(Holder.current(), process_started_at=1.0)
    assert make(tmp_path, clock, holder=impostor).acquire("runs/a") is not None
    assert make(tmp_path, clock).acquire("runs/a") is not None


def test_a_zombie_learns_that_it_was_succeeded(tmp_path: Path) -> None:
    clock = Clock()
    zombie = make(tmp_path, clock, holder=ELSEWHERE)
    lease = zombie.acquire("runs/a")
    assert lease is not None
    clock.now += LEASE_SECONDS + 1
    assert make(tmp_path, clock).acquire("runs/a") is not None
    with pytest.raises(LeaseError, match="was taken over by process"):
        zombie.renew(lease)
    zombie.release(lease)
    newest = zombie.newest("runs/a")
    assert newest is not None
    assert not newest.released
