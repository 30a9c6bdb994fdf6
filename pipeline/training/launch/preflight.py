"""What must hold before ranks wait for each other in a collective.

Owns the checks that need processes and no model: every rank reaches every other, clocks agree, all see one workspace,
the device and the space for checkpoints are there; and the choice of the network interface. Reductions are checked
against known sums once the mesh stands (`parallel/sharding.py`). The one decision: each rank leaves its findings in the
gang's TCP store, so every rank raises the same error with the findings of all, and nobody waits past the deadline for
one that never came.
"""

import json
import os
import secrets
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from pipeline.artifacts.store import Store, open_store
from pipeline.errors import ClusterError, ParameterError, PipelineError, StoreError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.device import check_device_present
from pipeline.training.rank_sources import ENVIRONMENT_STORE
from pipeline.training.worker import WorkerContext

PREFLIGHT_SECONDS = 60.0
"""For all ranks to come and to say what they found."""
CONNECT_SECONDS = 5.0
MAX_CLOCK_OFFSET_SECONDS = 10.0
"""Leases expire after 30 s and recovery times are told in seconds; hosts that keep time differ by milliseconds."""
MIN_FREE_BYTES = 2**28
"""Where no checkpoint says how large one is."""
_CLOCK_ROUNDS = 5
_ASKED_AT_ONCE = 32
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TOKEN_BYTES = 16
_SEEN_SECONDS = 3.0
"""What rank 0 wrote is looked for so long: a client of NFS may not see a new name at once."""
_MARKS = "preflight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What was found right."""

    clock_offsets_seconds: Mapping[int, float]
    """By rank: rank 0's clock minus its own."""
    interface: str
    """Of collectives; empty where there is one rank."""

    def __str__(self) -> str:
        if not self.clock_offsets_seconds:
            return "pre-flight: one rank, with its device and space for checkpoints"
        largest = max(abs(offset) for offset in self.clock_offsets_seconds.values())
        ranks = len(self.clock_offsets_seconds)
        return f"pre-flight: {ranks} ranks reach each other over {self.interface}; clocks differ by {largest:.3f} s"


def met(
    worker: WorkerContext, *, workspace: str, timeout_seconds: float = PREFLIGHT_SECONDS
) -> tuple[WorkerContext, Preflight]:
    """Meet the other ranks and check what can be checked without a model; called by all ranks at once.

    Args:
        worker: with the address of the store.
        workspace: where checkpoints go.
        timeout_seconds: for all of it.

    Returns:
        The worker with the gang's open store, and what was found.

    Raises:
        ParameterError: a rank lacks its device, has no route to rank 0's host, or does not see rank 0's workspace.
        ClusterError: ranks cannot reach each other or did not come, their clocks differ, storage is away, or there is
            no space for checkpoints. But for a missing route, both name every problem of every rank.
    """
    problems = local_problems(worker, workspace=workspace)
    address = worker.store_address
    if worker.world_size == 1 or address is None:
        if problems:
            raise _error([(worker.rank, problem) for problem in problems])
        return worker, Preflight(clock_offsets_seconds={}, interface="")
    until = time.monotonic() + timeout_seconds
    store = _open_store(worker, address, timeout_seconds=timeout_seconds)
    host = os.environ.get("MASTER_ADDR", "") if address == ENVIRONMENT_STORE else address.rpartition(":")[0]
    interface, own_address = use_interface(host)
    files = open_store(workspace)
    with _answering(own_address) as (port, token), _marked(files, worker, token, problems) as mark:
        mine = {"address": own_address, "port": port, "token": token, "host": socket.gethostname(), "mark": mark}
        store.set(f"place/{worker.rank}", json.dumps(mine))
        places, problems_of_others = _collect(store, "place", worker.world_size, until=until)
        others = {rank: place for rank, place in places.items() if rank != worker.rank}
        offset, unreached = _reach(others, until=until - min(CONNECT_SECONDS, timeout_seconds / 2))
        problems += unreached + (_unseen(files, others[0]) if 0 in others else [])
        if abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
            problems.append(f"its clock is {-offset:+.1f} s off rank 0's; at most {MAX_CLOCK_OFFSET_SECONDS:g} s")
        store.set(f"found/{worker.rank}", json.dumps({"problems": problems, "offset": offset}))
        found, missing = _collect(store, "found", worker.world_size, until=until)
    everything = [(rank, problem) for rank, said in found.items() for problem in said["problems"]]
    everything += [(rank, f"did not come within {timeout_seconds:g} s") for rank in {*problems_of_others, *missing}]
    if everything:
        raise _error(sorted(everything))
    offsets = {rank: float(said["offset"]) for rank, said in found.items()}
    gang = dist.PrefixStore("gang", store)
    return replace(worker, store=gang), Preflight(clock_offsets_seconds=offsets, interface=interface)


def _reach(others: Mapping[int, Mapping[str, Any]], *, until: float) -> tuple[float, list[str]]:
    """Rank 0's clock minus this one's, and which ranks cannot be reached; nobody is asked after `until`."""

    def ask(place: Mapping[str, Any]) -> float | OSError:
        if time.monotonic() > until:
            return OSError("no time was left to try; others took too long")
        try:
            return clock_offset(place)
        except OSError as error:
            return error

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        answers = dict(zip(others, pool.map(ask, others.values()), strict=True))
    there = {rank: f"{place['address']}:{place['port']} ({place['host']})" for rank, place in others.items()}
    problems = [
        f"cannot reach rank {rank} at {there[rank]}: {answer}"
        for rank, answer in answers.items()
        if isinstance(answer, OSError)
    ]
    first = answers.get(0, 0.0)
    return (first if isinstance(first, float) else 0.0), problems


@contextmanager
def _marked(files: Store, worker: WorkerContext, token: str, problems: list[str]) -> Iterator[str]:
    """Leave an object of rank 0's in the workspace while the context is open; its key, or nothing where there is none.

    What goes wrong becomes one of `problems`, for the other ranks wait to hear of it.
    """
    mark = f"{_MARKS}/{token}" if worker.is_first else ""
    try:
        if mark:
            files.write(mark, token.encode())
    except StoreError as error:
        problems.append(f"storage: {error.message}")
        mark = ""
    try:
        yield mark
    finally:
        if mark:
            with suppress(StoreError):  # a few bytes, which hinder nobody
                files.delete(mark)


def _unseen(files: Store, first: Mapping[str, Any]) -> list[str]:
    """What is wrong where this rank does not find in the workspace what rank 0 wrote there."""
    if not first["mark"]:
        return []
    until = time.monotonic() + _SEEN_SECONDS
    try:
        while files.read(first["mark"]) is None:
            if time.monotonic() > until:
                return [
                    f"workspace: {files.url} on {socket.gethostname()} is not where rank 0 writes on {first['host']}, "
                    "so no checkpoint could be committed"
                ]
            time.sleep(0.1)
    except StoreError as error:
        return [f"storage: {error.message}"]
    return []


def local_problems(worker: WorkerContext, *, workspace: str) -> list[str]:
    """What this rank lacks by itself."""
    problems = []
    try:
        check_device_present(worker.device)
    except ParameterError as error:
        problems.append(f"device: {error.message}")
    store = open_store(workspace)
    if store.is_local:
        # Room for one more is enough: training ran with it, and what a save that was killed has left may lie there too.
        sizes = [sum(file.size for file in commit.files) for commit in find_resumable(store).commits[:1]]
        needed = max(sizes, default=MIN_FREE_BYTES)
        free = shutil.disk_usage(_existing(Path(workspace))).free
        if free < needed:
            problems.append(
                f"space: {workspace} has {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} MiB are needed for "
                "checkpoints"
            )
    return problems


def use_interface(host: str) -> tuple[str, str]:
    """Let collectives take the interface of the route to rank 0; its name, and this machine's address on it.

    A host name may resolve to loopback on one machine only. A variable that the user has set stays.

    Raises:
        ParameterError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing; the system chooses the route
        except OSError as error:
            raise ParameterError(
                f"rank 0's host {host!r} cannot be reached from {socket.gethostname()}: {error}",
                hint="MASTER_ADDR must be a name or address of rank 0's node that every node resolves",
            ) from error
        address = str(probe.getsockname()[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            for name in _INTERFACES:
                os.environ.setdefault(name, interface)
            return os.environ[_INTERFACES[0]], address
    return "", address


def clock_offset(place: Mapping[str, Any]) -> float:
    """The other rank's clock minus this one's in seconds, by the fastest of several round trips.

    Raises:
        OSError: it cannot be reached, or somebody else answers there.
    """
    with socket.create_connection((place["address"], place["port"]), timeout=CONNECT_SECONDS) as link:
        best, offset = float("inf"), 0.0
        for _ in range(_CLOCK_ROUNDS):
            asked_at, start = time.time(), time.perf_counter()
            link.sendall(b"?")
            try:
                answer = json.loads(_line(link))
                is_rank = answer["token"] == place["token"]
            except (ValueError, KeyError, TypeError):
                is_rank = False
            took = time.perf_counter() - start
            if not is_rank:
                raise OSError("another process answers there")
            if took < best:
                best, offset = took, answer["time"] - (asked_at + took / 2)
    return offset


def _line(link: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = link.recv(256)
        if not part:
            raise OSError("it hung up")
        data += part
    return data


@contextmanager
def _answering(address: str) -> Iterator[tuple[int, str]]:
    """Answer other ranks with this one's time; the port, and the token that proves who answers."""
    token = secrets.token_hex(_TOKEN_BYTES)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(CONNECT_SECONDS)
            while self.request.recv(1):
                self.request.sendall(json.dumps({"token": token, "time": time.time()}).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A caller that hangs up in the middle says so itself."""

    with Server((address, 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1]), token
        finally:
            server.shutdown()
            thread.join()


def _open_store(worker: WorkerContext, address: str, *, timeout_seconds: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if address == ENVIRONMENT_STORE:
            store, _, _ = next(dist.rendezvous(address, worker.rank, worker.world_size, timeout=timeout))
        else:
            host, _, port = address.rpartition(":")
            # Rank 0 does not wait here for the others: who never came is told below, by name.
            store = dist.TCPStore(host, int(port), is_master=worker.is_first, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"rank {worker.rank} on {socket.gethostname()} cannot reach the store of rank 0 at {address} within "
            f"{timeout_seconds:g} s: {str(error).splitlines()[0]}",
            hint="rank 0 must be started too, and its port must be open between the nodes",
        ) from error
    return dist.PrefixStore("preflight", store)


def _collect(
    store: dist.Store, name: str, world_size: int, *, until: float
) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """What each rank said under a name, and the ranks that said nothing in time."""
    found, missing = {}, []
    for rank in range(world_size):
        left = max(0.05, until - time.monotonic())
        try:
            store.wait([f"{name}/{rank}"], timedelta(seconds=left))
        except RuntimeError:
            missing.append(rank)
        else:
            found[rank] = json.loads(store.get(f"{name}/{rank}"))
    return found, missing


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _error(problems: list[tuple[int, str]]) -> PipelineError:
    text = "pre-flight: " + "; ".join(f"rank {rank} {problem}" for rank, problem in problems)
    if any(problem.startswith("device:") for _, problem in problems):
        return ParameterError(text, hint="use device: auto, or nodes that have the device")
    if any(problem.startswith("workspace:") for _, problem in problems):
        return ParameterError(
            text,
            hint="ranks of several hosts need a store that all of them write to: a URL such as s3://bucket/path, or a "
            "directory of a file system that they share (`--store`, or `workspace` of a job file)",
        )
    return ClusterError(text, hint="every rank needs a route to every other, the same time, and space for checkpoints")
