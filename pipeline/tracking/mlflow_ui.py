"""MLflow's own user interface on a store.

Owns the command, its environment and its end. Loads no MLflow itself. The one decision: one worker on the loopback
interface, without MLflow's job runner (four more processes that only its evaluation features need), as a child that
ends with its parent.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import TrackingError, UsageError
from pipeline.tracking.mlflow_settings import ARTIFACT_DIRECTORY, SQLITE
from pipeline.tracking.redaction import scrub

LOOPBACK = "127.0.0.1"
READY_TIMEOUT_SECONDS = 60.0
"""Measured: 7 s on two idle cores."""
STOP_TIMEOUT_SECONDS = 10.0
UI_SETTINGS: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


def training_address(url: str) -> str:
    """Where a person should start: the experiments as model training, not as traces of an agent."""
    return f"{url}/#/experiments?workflowType=machine_learning"


def ui_command(uri: str, *, host: str = LOOPBACK, port: int) -> list[str]:
    """The command that serves MLflow's interface on the backend store `uri`.

    What is uploaded through a server on an SQLite file goes beside that file; MLflow's own default would be the
    directory in which the command happened to be typed.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    if uri.startswith(SQLITE):
        command += ["--artifacts-destination", str(Path(uri.removeprefix(SQLITE)).parent / ARTIFACT_DIRECTORY)]
    return [*command, "--host", host, "--port", str(port), "--workers", "1"]


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def ui_server(
    uri: str,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    log_path: Path,
    ready_timeout_seconds: float = READY_TIMEOUT_SECONDS,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve the interface while the block runs; gives its URL, which answers, and its process.

    Args:
        uri: the backend store, `sqlite:///PATH` for instance.
        host: interface to listen on.
        port: TCP port; a free one where None.
        log_path: file for the server's own lines.
        ready_timeout_seconds: until it answers.

    Raises:
        UsageError: `uri` is a tracking server, which has an interface of its own.
        TrackingError: the server ended or did not answer in time; quotes the end of its log.
    """
    if uri.startswith(("http://", "https://")):
        raise UsageError(f"{scrub(uri)} is a tracking server already", hint="open that address in a browser")
    port = free_port(host) if port is None else port
    url = f"http://{host}:{port}"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            ui_command(uri, host=host, port=port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**UI_SETTINGS, **os.environ},
            start_new_session=True,
        )
        try:
            _await_ready(process, url, log_path, ready_timeout_seconds)
            yield url, process
        finally:
            _stop(process)


def serve_ui(
    uri: str,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    log_path: Path,
    on_ready: Callable[[str], None],
) -> int:
    """Serve until the server ends or the user interrupts; the server's exit code, 0 after an interrupt.

    Raises:
        UsageError, TrackingError: as `ui_server`.
    """
    with ui_server(uri, host=host, port=port, log_path=log_path) as (url, process):
        on_ready(url)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 0


def _await_ready(process: subprocess.Popen[bytes], url: str, log_path: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TrackingError(f"MLflow's interface ended with exit code {process.returncode}:\n{_end_of(log_path)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TrackingError(f"MLflow's interface did not answer within {timeout_seconds:.0f} s:\n{_end_of(log_path)}")


def _end_of(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return scrub("\n".join(f"  {line}" for line in lines[-12:]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which share its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
