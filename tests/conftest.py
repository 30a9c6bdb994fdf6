"""Fixtures of the whole suite, and the rules it runs under.

One Ray head is started once a session, by the product's own code, and dies with the test process. `make test` runs
the tests marked `ray` or `browser` one after the other, after the others ran side by side: two cores are never asked
for more than one cluster's work.
"""

import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A handle of Ray Serve that a test leaves behind reports from a thread of its own; between two tests, when this process
# is connected to no cluster, that would start one.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# The session's head takes this token, so that it does not matter which test imports ray first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

PROJECT = Path(__file__).resolve().parent.parent
SESSION_CPUS = 4


@pytest.fixture(scope="session")
def project() -> Path:
    """The repository."""
    return PROJECT


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the session's Ray head."""
    from pipeline.cluster.head import start_head, stop_head
    from pipeline.cluster.serve_environment import serve_environment

    directory = tmp_path_factory.mktemp("head")
    head = start_head(
        directory,
        num_cpus=SESSION_CPUS,
        environment=lambda private: serve_environment(directory=private),
        die_with_parent=True,
    )
    yield head.address
    stop_head(directory)


@pytest.fixture
def ray_cluster(ray_head: str) -> Iterator[str]:
    """The session's Ray head with this process connected to it."""
    from pipeline.cluster import ray_connection

    ray_connection.connect(ray_head, verbose=False)
    yield ray_head
    ray_connection.disconnect()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of moto's S3 server on the loopback interface."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty place in a bucket; clients find the server by the environment, as they do with MinIO."""
    import botocore.session
    import fsspec

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)
    botocore.session.get_session().create_client("s3").create_bucket(Bucket="training")
    yield f"s3://training/place-{secrets.token_hex(4)}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def in_a_process() -> Iterator[Callable[..., Any]]:
    """Calls a function of a module that can be imported, in a process that did nothing before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # whose end ends the process, whatever it does
        yield lambda function, *given, **named: pool.apply(function, given, named)
