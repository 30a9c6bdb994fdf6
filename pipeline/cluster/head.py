"""The local Ray head: started in the background, noted in the store's directory, stopped by `pipeline down`.

Owns the head's life. Knows nothing of what runs on it and does not import ray. The one decision: the head is one
`ray start --block` process in a session of its own, known by process id *and* start time, so that `down` ends exactly
the processes this product started and never another Ray on the machine.
"""

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pipeline.errors import ClusterError

HEAD_NAME = "head.json"
START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 15.0
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
"""Ray would drain the node for up to 30 s on SIGTERM; the only node of a cluster has nobody to hand its work to."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A running local head."""

    address: str
    pid: int
    process_started_at: float
    """By the kernel's account; tells a reused process id apart."""
    temporary_directory: str
    num_cpus: float
    started_at: float
    environment: Mapping[str, str]

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables a process needs, before it imports ray, to be let in."""
        return {name: value for name, value in self.environment.items() if name.startswith("RAY_AUTH_")}

    @property
    def is_alive(self) -> bool:
        """True while the head's process is the one that was started."""
        try:
            process = psutil.Process(self.pid)
            return (
                process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.process_started_at) < 1.0
            )
        except psutil.NoSuchProcess:
            return False


def free_port(*, start: int | None = None) -> int:
    """A TCP port nobody listens on at the loopback interface; the first from `start` where given."""
    candidates = range(start, start + 200) if start is not None else [0]
    for candidate in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ClusterError(f"no free TCP port between {start} and {candidates[-1]} on this machine")


def find_head(directory: Path) -> Head | None:
    """The head noted in `directory`, or None where none runs (a note of a dead head is removed)."""
    note = directory / HEAD_NAME
    try:
        head = Head(**json.loads(note.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        note.unlink(missing_ok=True)
        return None
    if head.is_alive:
        return head
    _end(_family(head))  # a head that was killed leaves its agents behind
    note.unlink(missing_ok=True)
    return None


def start_head(
    directory: Path, *, num_cpus: int, environment: Callable[[Path], Mapping[str, str]], die_with_parent: bool
) -> Head:
    """Start a head and wait until it accepts connections.

    Args:
        directory: where `head.json` and the head's own log go.
        num_cpus: logical CPUs the head offers.
        environment: the head's short private directory to the variables that Ray and all its workers see beside this
            process's own.
        die_with_parent: end the head when this process ends, however it ends.

    Raises:
        ClusterError: the head did not come up; the message ends with its log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    temporary = Path("/tmp") / f"pipeline-ray-{os.getpid()}-{port}"  # unix sockets need a short path
    temporary.mkdir(mode=0o700)  # HAProxy's admin socket in it is open to everyone who can reach it
    log_path = directory / "ray-head.log"
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", str(num_cpus)),
        *("--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(temporary)),
        *("--ray-client-server-port", str(free_port())),
    ]
    variables = {**environment(temporary), **_authentication(), **AT_ONCE}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=_end_with_parent if die_with_parent else None,
        )
    head = Head(
        address=f"127.0.0.1:{port}",
        pid=process.pid,
        process_started_at=psutil.Process(process.pid).create_time(),
        temporary_directory=str(temporary),
        num_cpus=num_cpus,
        started_at=time.time(),
        environment=variables,
    )
    note = directory / HEAD_NAME
    note.touch(mode=0o600)
    note.write_text(json.dumps(asdict(head), indent=1))
    _wait_until_up(process, log_path)
    return head


def stop_head(directory: Path) -> Head | None:
    """End the noted head and every process below it; returns what was stopped, None where nothing ran."""
    head = find_head(directory)
    if head is None:
        return None
    root = psutil.Process(head.pid)
    family = [root, *root.children(recursive=True)]
    root.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_SECONDS)
    _end([*alive, *_family(head)])
    (directory / HEAD_NAME).unlink(missing_ok=True)
    return head


def _authentication() -> dict[str, str]:
    """Ray listens on this machine's own address too, so nobody without the head's token may talk to it."""
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _family(head: Head) -> list[psutil.Process]:
    """Processes of the head's session, and those that name its private directory."""
    found = []
    for process in psutil.process_iter():
        try:
            names_it = f"{head.temporary_directory}/" in "/ ".join(process.cmdline()) + "/"
            if os.getsid(process.pid) == head.pid or names_it:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)


def _wait_until_up(process: "subprocess.Popen[bytes]", log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        text = log_path.read_text(errors="replace")
        if "Ray runtime started" in text:
            return
        if process.poll() is not None:
            raise ClusterError(
                f"the local Ray head ended with code {process.returncode}; its log says:\n{text[-2000:]}"
            )
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    raise ClusterError(
        f"the local Ray head did not start within {START_TIMEOUT_SECONDS:g} s; its log is {log_path}",
        hint="look into that log; a machine short of memory or file handles is the usual cause",
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
