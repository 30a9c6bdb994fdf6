"""SIGTERM under load: what was accepted is finished, and nothing new is."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
NUM_CLIENTS = 12
DRAIN_SECONDS = 20.0


class Client(threading.Thread):
    """Asks until it is refused; every second one streams."""

    def __init__(self, url, index):
        super().__init__(daemon=True)
        self.num_whole = 0
        self.torn = []
        self._url = url
        self._is_stream = bool(index % 2)
        self.start()

    def run(self):
        fields = {"model": "tiny", "prompt": "def", "max_tokens": 70, "temperature": 0, "stream": self._is_stream}
        while True:
            received = ""
            try:
                with httpx.stream("POST", f"{self._url}/v1/completions", json=fields, timeout=30) as answer:
                    for part in answer.iter_text():
                        received += part
                    whole = "data: [DONE]" in received if self._is_stream else answer.status_code == 200
            except httpx.TransportError as error:
                if received:
                    self.torn.append(repr(error))
                return  # the connection was refused, or closed before the request was read
            if not whole:
                self.torn.append(f"{answer.status_code}: {received}")
            self.num_whole += 1


@pytest.fixture
def server(tmp_path):
    """(process, URL, file of the account)."""
    account = tmp_path / "account.json"
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "draining_server.py"), str(account), str(DRAIN_SECONDS)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    yield process, url, account
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


def test_a_server_that_is_told_to_end_loses_no_request_it_accepted(server):
    process, url, account = server
    clients = [Client(url, index) for index in range(NUM_CLIENTS)]
    while sum(client.num_whole for client in clients) < NUM_CLIENTS / 2:
        time.sleep(0.02)
        assert process.poll() is None
    assert httpx.get(f"{url}/ready").status_code == 200
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    while time.monotonic() - told < DRAIN_SECONDS:
        try:
            is_ready = httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            is_ready = False
        if not is_ready:
            break
    assert not is_ready, "readiness goes before the process"
    assert process.poll() is None, "while the process still finishes what it accepted"
    process.wait(timeout=DRAIN_SECONDS)
    for client in clients:
        client.join(timeout=DRAIN_SECONDS)
    assert [torn for client in clients for torn in client.torn] == []
    found = json.loads(account.read_text())
    assert found["accepted"] == found["finished"] == sum(client.num_whole for client in clients)
    assert process.returncode in (0, -signal.SIGTERM)
