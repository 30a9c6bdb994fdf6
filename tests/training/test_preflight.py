"""What ranks find out about each other before the first collective; here ranks are threads of one process."""

import json
import shutil
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.errors import ClusterError, ParameterError
from pipeline.training.launch import preflight
from pipeline.training.launch.preflight import clock_offset, met
from pipeline.training.launch.spawn import free_port

CLOCK_TOLERANCE_SECONDS = 0.25
"""One clock read by threads of a busy process. Measured: below 2 ms."""


@pytest.fixture
def meet(one_rank, tmp_path, monkeypatch):
    """`meet(3)`: what each of three ranks gets, or raises, in their order."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def call(num_ranks, *, come=None, timeout_seconds=20.0, workspaces=None, **fields):
        address = f"127.0.0.1:{free_port()}"
        places = workspaces or [str(tmp_path / "not" / "yet")] * num_ranks

        def one(rank):
            worker = replace(one_rank, rank=rank, world_size=num_ranks, store_address=address, **fields)
            try:
                return met(worker, workspace=places[rank], timeout_seconds=timeout_seconds)
            except (ClusterError, ParameterError) as error:
                return error

        with ThreadPoolExecutor(num_ranks) as ranks:
            return list(ranks.map(one, range(num_ranks if come is None else come)))

    return call


def test_ranks_that_reach_each_other_share_a_store_and_know_their_clocks(meet):
    results = meet(3)
    for worker, found in results:
        assert found.interface == "lo"
        assert set(found.clock_offsets_seconds) == {0, 1, 2}
        assert max(map(abs, found.clock_offsets_seconds.values())) < CLOCK_TOLERANCE_SECONDS
        assert str(found).startswith("pre-flight: 3 ranks reach each other over lo; clocks differ by 0.")
        worker.store.set(f"here/{worker.rank}", "yes")
    assert results[0][0].store.get("here/2") == b"yes"


def test_a_rank_alone_looks_at_itself_only(meet):
    ((worker, found),) = meet(1)
    assert worker.store is None
    assert str(found) == "pre-flight: one rank, with its device and space for checkpoints"


def test_a_rank_that_never_comes_is_named_at_the_deadline(meet):
    start = time.monotonic()
    (error,) = meet(2, come=1, timeout_seconds=1.0)
    assert "rank 1 did not come within 1 s" in str(error)
    assert time.monotonic() - start < 5


def test_rank_0_that_never_comes_is_told_by_the_others(one_rank, tmp_path):
    worker = replace(one_rank, rank=1, world_size=2)
    with pytest.raises(ClusterError, match=r"rank 1 on .* cannot reach the store of rank 0 at 127.0.0.1"):
        met(worker, workspace=str(tmp_path), timeout_seconds=1.0)


def test_every_problem_of_every_rank_is_raised_by_all_of_them(meet, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    monkeypatch.setattr(preflight, "clock_offset", lambda _: -60.0)
    first, second = meet(2, device="cuda", timeout_seconds=20.0)
    assert str(first) == str(second)
    assert isinstance(first, ParameterError)
    for rank in (0, 1):
        assert f"rank {rank} device: " in str(first)
        assert f"rank {rank} space: {tmp_path / 'not' / 'yet'} has 1 MiB free, 256 MiB are needed" in str(first)
    assert "rank 1 its clock is +60.0 s off rank 0's; at most 10 s" in str(first)


def test_a_workspace_that_is_another_one_on_each_host_is_refused_before_training(meet, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_SEEN_SECONDS", 0.2)
    first, second, third = meet(3, workspaces=[str(tmp_path / name) for name in ("a", "a", "b")])
    assert str(first) == str(second) == str(third)
    assert isinstance(first, ParameterError)
    host = socket.gethostname()
    assert f"rank 2 workspace: {tmp_path / 'b'} on {host} is not where rank 0 writes on {host}" in str(first)
    assert "rank 1" not in str(first)
    assert "a URL such as s3://bucket/path" in str(first)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # the mark is taken away


def test_storage_that_rank_0_cannot_write_to_is_told_by_all(meet, tmp_path):
    (tmp_path / "file").touch()
    first, second = meet(2, workspaces=[str(tmp_path / "file" / "below")] * 2)
    assert str(first) == str(second)
    assert isinstance(first, ClusterError)
    assert "rank 0 storage: store: cannot write" in str(first)


def test_a_port_behind_a_firewall_is_told_with_both_ends(meet, monkeypatch):
    @contextmanager
    def closed(address):
        yield free_port(), "token"

    monkeypatch.setattr(preflight, "_answering", closed)
    first, second = meet(2)
    assert str(first) == str(second)
    assert isinstance(first, ClusterError)
    assert "rank 0 cannot reach rank 1 at 127.0.0.1:" in str(first)
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in str(first)


def test_many_silent_ranks_take_no_longer_than_the_deadline(monkeypatch):
    asked = []

    def silent(place):
        asked.append(place["port"])
        time.sleep(1.1)
        raise OSError("timed out")

    monkeypatch.setattr(preflight, "clock_offset", silent)
    others = {rank: {"address": "10.0.0.1", "port": rank, "host": "far"} for rank in range(200)}
    start = time.monotonic()
    offset, problems = preflight._reach(others, until=start + 1.0)
    assert time.monotonic() - start < 10
    assert len(asked) == 32
    assert offset == 0.0
    assert len(problems) == 200
    assert problems[3] == "cannot reach rank 3 at 10.0.0.1:3 (far): timed out"
    assert problems[199].endswith("no time was left to try; others took too long")


def test_a_training_that_goes_on_needs_room_for_one_checkpoint(one_rank, tmp_path, monkeypatch):
    file = SimpleNamespace(size=2**30)
    found = SimpleNamespace(commits=[SimpleNamespace(files=[file])])
    monkeypatch.setattr(preflight, "find_resumable", lambda _: found)
    usage = shutil.disk_usage(tmp_path)
    for free, told in ((2**30, 0), (2**30 - 1, 1)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert len(preflight.local_problems(one_rank, workspace=str(tmp_path))) == told


def test_another_clock_is_measured_and_another_process_is_no_rank():
    class Ahead(socketserver.BaseRequestHandler):
        def handle(self):
            while self.request.recv(1):
                self.request.sendall(json.dumps({"token": "mine", "time": time.time() + 60}).encode() + b"\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Ahead) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        place = {"address": "127.0.0.1", "port": server.server_address[1], "token": "mine"}
        assert clock_offset(place) == pytest.approx(60, abs=CLOCK_TOLERANCE_SECONDS)
        with pytest.raises(OSError, match="another process answers there"):
            clock_offset(place | {"token": "other"})
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        preflight.CONNECT_SECONDS, before = 0.2, preflight.CONNECT_SECONDS
        try:
            clock_offset({"address": "127.0.0.1", "port": silent.getsockname()[1], "token": ""})
        finally:
            preflight.CONNECT_SECONDS = before
