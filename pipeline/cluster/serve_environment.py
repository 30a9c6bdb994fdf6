"""What a Ray head must find in its environment so that Ray Serve answers through HAProxy.

Owns the `RAY_SERVE_*` variables. Imports nothing of Ray: Serve reads them once, when its processes start, so they must
be set on the head. The one decision: requests go from HAProxy straight to the replica's own HTTP server (0.8 ms at the
median on two cores; 4.8 ms through the Python proxy, a second hop through a Python process), and every path and port
that HAProxy would share between two heads of one machine is this head's own.
"""

import secrets
import socket
from pathlib import Path

from pipeline.errors import ClusterError

MAX_SOCKET_PATH_BYTES = 97
"""HAProxy's limit: a unix socket's path may have 107 bytes, and it adds a process id while it reloads."""
NODE_ID_CHARACTERS = 56
"""Ray Serve puts a directory named after the node between the configured directory and each file."""
UNAVAILABLE = Path(__file__).with_name("unavailable.http")
"""What HAProxy says in place of a replica: 503 with `Retry-After`; Ray Serve would have it say 500."""
NUM_RETRIES = 3
BUFFER_BYTES = 64 * 2**10
"""A longer request is not sent again. HAProxy takes two such buffers for each connection that is busy."""
SCALING_SECONDS = 1.0
"""Between two messages of a replica about its requests in flight."""
_PORT_RANGE = (20000, 29999)
"""Below Linux' ephemeral ports, above the well-known ones."""


def serve_environment(
    *, directory: Path, haproxy: bool = True, drain_seconds: float = 2.0, num_threads: int = 1
) -> dict[str, str]:
    """Variables for the head process (and, harmlessly, the driver).

    Args:
        directory: a short path of this head's own; HAProxy's config, sockets and state go below it.
        haproxy: False leaves Serve's Python proxy in place.
        drain_seconds: a replica that leaves keeps answering at least that long, so that HAProxy forgets it first.
        num_threads: of HAProxy.

    Raises:
        ClusterError: `directory` is too long for a unix socket.
    """
    if not haproxy:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    home = directory / "haproxy"
    # One letter, beside and not below `home`: every byte counts.
    admin_socket, metrics_socket = directory / "a", directory / "m"
    num_bytes = len(str(admin_socket).encode()) + 1 + NODE_ID_CHARACTERS
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ClusterError(
            f"{directory}: HAProxy's socket below it would have {num_bytes} bytes in its path; "
            f"{MAX_SOCKET_PATH_BYTES} are allowed",
            hint=f"use a directory that is {num_bytes - MAX_SOCKET_PATH_BYTES} bytes shorter for the head",
        )
    stats_port, metrics_port, fallback_port, fallback_grpc_port = _random_free_ports(4)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(admin_socket),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(metrics_socket),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(home),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(home / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        # Serve's own proxy, which HAProxy asks while no replica is known to it.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(num_threads),
        **_when_a_replica_dies(),
        # One log datagram a request for metrics that /metrics of the replica has anyway.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{drain_seconds:g}",
        # Replicas that scale tell the controller what is in flight; Ray Serve's 10 s would delay every decision.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{SCALING_SECONDS:g}",
    }


def _when_a_replica_dies() -> dict[str, str]:
    """A request whose replica died before it said anything goes to another one; where there is none, 503.

    Asking twice changes nothing here: a request that was computed and not delivered leaves no trace. Ray Serve writes
    both values into the `defaults` of HAProxy's configuration as they are, so the lines behind them are lines of it.
    """
    # Only a request that HAProxy holds whole can be sent again, so it waits for the body, and has room for it.
    retry_on = ("conn-failure empty-response", "option http-buffer-request")
    errors = tuple(f'errorfile {status} "{UNAVAILABLE}"' for status in (502, 503, 504))
    return {
        "RAY_SERVE_HAPROXY_RETRY_ON": "\n    ".join(retry_on),
        "RAY_SERVE_HAPROXY_RETRIES": str(NUM_RETRIES),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(("leastconn", *errors)),
    }


def _random_free_ports(count: int) -> list[int]:
    # Random, because HAProxy binds with SO_REUSEPORT: two heads that chose the same port before either of them
    # listens would share it without an error.
    low, high = _PORT_RANGE
    ports: list[int] = []
    for _ in range(1000):
        candidate = low + secrets.randbelow(high - low + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
        if candidate not in ports:
            ports.append(candidate)
        if len(ports) == count:
            return ports
    raise ClusterError(f"no {count} free TCP ports between {low} and {high} on this machine")
