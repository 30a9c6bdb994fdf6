"""An ASGI application behind uvicorn, in a thread of the process that made it.

Owns the server of both sides of `pipeline bench serve`, so that what is compared is what answers and not what listens.
"""

import threading
import time

import uvicorn
from starlette.types import ASGIApp

from pipeline.errors import StageError

_START_SECONDS = 30.0


def listen(app: ASGIApp) -> int:
    """Serve until the process ends; the port, of the loopback alone.

    Raises:
        StageError: the server did not start.
    """
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    threading.Thread(target=server.run, name="http", daemon=True).start()
    deadline = time.monotonic() + _START_SECONDS
    while not server.started:
        if time.monotonic() > deadline:
            raise StageError(f"uvicorn did not listen within {_START_SECONDS:g} s")
        time.sleep(0.01)
    return int(server.servers[0].sockets[0].getsockname()[1])
