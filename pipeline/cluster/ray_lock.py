"""One at a time, over all processes that are connected to a Ray cluster.

Owns the lock: a key of the cluster's own store that exists once. The one decision: whoever holds it says until when, so
a holder that was killed holds it no longer than that.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from pipeline.errors import ClusterError

NAMESPACE = "pipeline-locks"
POLL_SECONDS = 0.1


@contextmanager
def cluster_lock(name: str, *, timeout_seconds: float, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `name`, at most for `timeout_seconds` from now; waiting for it counts.

    Raises:
        ClusterError: somebody else held it all the time.
    """
    deadline = time.time() + timeout_seconds
    mine = json.dumps({"who": f"process {os.getpid()} on {socket.gethostname()}", "until": deadline, "key": _token()})
    said = ""
    while _internal_kv_put(name, mine, overwrite=False, namespace=NAMESPACE):
        found = _internal_kv_get(name, namespace=NAMESPACE)
        holder = {} if found is None else json.loads(found)
        if found is not None and holder["until"] < time.time():
            _internal_kv_del(name, namespace=NAMESPACE)
            continue
        if time.time() > deadline:
            raise ClusterError(
                f"{holder.get('who', 'another process')} has been changing {name!r} for {timeout_seconds:.0f} s",
                hint="wait for it, or stop that process",
            )
        if holder.get("who", "") != said:
            said = holder.get("who", "")
            on_wait(f"waiting for {said or 'another process'}, which changes {name!r}")
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        if _internal_kv_get(name, namespace=NAMESPACE) == mine.encode():
            _internal_kv_del(name, namespace=NAMESPACE)


def _token() -> str:
    return secrets.token_hex(8)
