"""This process's connection to Ray.

Owns `ray.init` and `ray.shutdown` of the driver. The one decision: Ray's own chatter stays in its log files unless
the user asks for it.
"""

import logging
import os
import signal
import socket
import threading

import ray

from pipeline.cluster.capacity import Capacity
from pipeline.errors import ClusterError

NAMESPACE = "pipeline"
REACH_SECONDS = 5.0
LOOK_SECONDS = 2.0


def connect(address: str, *, verbose: bool) -> Capacity:
    """Connect the driver and say what the cluster has.

    Raises:
        ClusterError: nobody answers at the address.
    """
    _check_reachable(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leave CUDA_VISIBLE_DEVICES of CPU stages alone
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
            configure_logging=verbose,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error}",
            hint="check the address, or leave it out to use a local head",
        ) from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # ray.init installs its own; ours record the interrupt
            signal.signal(number, handler)
    totals = ray.cluster_resources()
    return Capacity(
        cpus=float(totals.get("CPU", 0.0)),
        gpus=float(totals.get("GPU", 0.0)),
        memory_bytes=int(totals.get("memory", 0)),
        source=f"the Ray cluster at {address}",
    )


def answers(address: str) -> bool:
    """True where somebody listens at HOST:PORT; asked of a cluster that this process is connected to."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _check_reachable(address: str) -> None:
    """Ray retries an address where nobody listens for minutes; a TCP connection tells in seconds."""
    host, _, port = address.rpartition(":")
    hint = "check the address, or leave it out to use a local head"
    if not host or not port.isdigit() or "://" in address:
        raise ClusterError(f"{address!r} is no address of a Ray cluster; it is written HOST:PORT", hint=hint)
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"nobody answers at {address} within {REACH_SECONDS:g} s: {error.strerror or error}", hint=hint
        ) from error


def available() -> dict[str, float]:
    """What is free right now, by resource name."""
    return {name: float(value) for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}


def disconnect() -> None:
    """Leave the cluster; what is detached (Ray Serve) goes on."""
    if ray.is_initialized():
        ray.shutdown()
