"""Two heads on one machine share no path and no port of HAProxy's."""

import json
from pathlib import Path

import pytest

from pipeline.cluster.serve_environment import (
    MAX_SOCKET_PATH_BYTES,
    NODE_ID_CHARACTERS,
    UNAVAILABLE,
    serve_environment,
)
from pipeline.errors import ClusterError

# Ports, and paths below the head's own directory.
OWN = ("PORT", "PATH", "FILE", "LOC", "BASE")


def test_two_heads_share_neither_paths_nor_ports():
    first, second = (serve_environment(directory=Path(f"/tmp/pipeline-ray-{pid}-46187")) for pid in (11, 12))
    assert first["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    own = [name for name in first if name.endswith(OWN)]
    assert len(own) >= 7
    for name in own:
        assert first[name] != second[name], name
    ports = [value for name, value in first.items() if name.endswith("PORT")]
    assert len(set(ports)) == len(ports) == 4


def test_sockets_fit_for_a_head_with_the_longest_process_id():
    directory = Path("/tmp/pipeline-ray-4194304-65535")
    socket = Path(serve_environment(directory=directory)["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    whole = socket.parent / ("n" * NODE_ID_CHARACTERS) / socket.name
    assert len(str(whole)) <= MAX_SOCKET_PATH_BYTES


def test_a_directory_that_is_too_long_is_refused_with_how_much():
    with pytest.raises(ClusterError, match="bytes shorter"):
        serve_environment(directory=Path("/tmp/a-directory-with-a-rather-long-name-for-sockets"))


def test_the_python_proxy_can_be_kept():
    assert serve_environment(directory=Path("/tmp/x"), haproxy=False) == {"RAY_SERVE_ENABLE_HA_PROXY": "0"}


def test_haproxys_own_answer_is_whole_http_and_says_when_to_ask_again():
    head, _, body = UNAVAILABLE.read_bytes().partition(b"\r\n\r\n")
    status, *fields = head.decode("ascii").split("\r\n")
    assert status == "HTTP/1.1 503 Service Unavailable"
    named = dict(field.split(": ") for field in fields)
    assert named["Retry-After"] == "1" and int(named["Content-Length"]) == len(body)
    assert json.loads(body)["error"]["message"]
    lines = serve_environment(directory=Path("/tmp/x"))["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"].splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["errorfile", code, f'"{UNAVAILABLE}"'] for code in ("502", "503", "504")
    ]
