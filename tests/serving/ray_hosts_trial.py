"""Run as a process: a Ray cluster of two nodes on this machine, a model over both, and the loss of one. Prints JSON."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import ray
from mesh_replica_trial import PROMPTS, settings_of, written
from ray.cluster_utils import Cluster

from pipeline.serving.accelerator.replica_environment import replica_environment
from pipeline.serving.replica_settings import ProcessSettings, ReplicaConfig
from pipeline.serving.rollout.ray_serve import deploy, ensure_serving, wait_until_running

READY_SECONDS = 150
FOLLOWER = "ray::FollowerHost"


def followers():
    """Of this cluster: child processes of this one's nodes."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[0].startswith(FOLLOWER):
                found.add(process.pid)
    return found


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def texts(url):
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 6, "temperature": 0}
    return [choice["text"] for choice in ask(f"{url}/v1/completions", body)["choices"]]


def texts_when_back(url, *, without):
    """The answers of the replica that took the lost one's place."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1)
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if followers() - without:
                return texts(url)
    return None


def trial(directory):
    endpoint = ensure_serving(host="127.0.0.1", port=None)
    environment = replica_environment(device="cpu", gpus=0, state_directory=None, num_hosts=2)
    process = ProcessSettings(
        identity="a",
        isolation="process",
        cpus=1,
        gpus=0,
        replicas=1,
        drain_seconds=1,
        environment={**environment, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    settings = settings_of(directory, mesh_tensor=2, mesh_hosts=2)
    started = time.monotonic()
    deploy("tiny", ReplicaConfig(models=(settings,), process=process))
    wait_until_running("tiny", timeout_seconds=READY_SECONDS, on_progress=lambda text: None)
    ready = time.monotonic() - started
    first, before = texts(endpoint.url), followers()
    mesh = ask(f"{endpoint.url}/health")["mesh"]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    lost = time.monotonic()
    second = texts_when_back(endpoint.url, without=before)
    return {
        "mesh": mesh,
        "first": first,
        "second": second,
        "num_followers": len(before),
        "ready_seconds": ready,
        "back_seconds": time.monotonic() - lost,
    }


def main():
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "dashboard_port": None}
    )
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        with tempfile.TemporaryDirectory() as root:
            found = trial(written(Path(root) / "one", 0))
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
