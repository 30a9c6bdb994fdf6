"""A server in a process of its own, for `test_http_drain.py`: `python draining_server.py ACCOUNT DRAIN_SECONDS`.

Prints its port when it listens; writes what it accepted and finished to ACCOUNT at the end of its lifespan.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvicorn
from stepped_engine import SteppedExecutor, stepped_engine
from tiny_llama import VOCABULARY, make_tokenizer

from pipeline.serving.grammar.vocabulary import Vocabulary
from pipeline.serving.http.http import make_surface
from pipeline.serving.http.http_routes import make_application
from pipeline.serving.http.model_registry import ModelRegistry
from pipeline.serving.http.sampling_fields import ServedModel

STEP_SECONDS = 0.01


class Accountant:
    """ASGI middleware that counts requests for work."""

    def __init__(self, app, path):
        self.accepted = self.finished = 0
        self._app = app
        self._path = path

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST":
            self.accepted += 1
            await self._app(scope, receive, send)
            self.finished += 1
            return
        await self._app(scope, receive, send)
        if scope["type"] == "lifespan":
            self._path.write_text(json.dumps({"accepted": self.accepted, "finished": self.finished}))


def main(account, drain_seconds):
    tokenizer = make_tokenizer()
    vocabulary = Vocabulary(tokenizer, num_tokens=VOCABULARY, stop_ids=(0,))
    surface = make_surface(
        engine=stepped_engine(SteppedExecutor(step_seconds=STEP_SECONDS), vocabulary),
        encoder=tokenizer,
        decoder=tokenizer,
        model=ServedModel(name="tiny", context=160, num_tokens=VOCABULARY, stop_ids=()),
        facts={},
    )
    app = Accountant(make_application(ModelRegistry([surface], drain_seconds=drain_seconds)), Path(account))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(drain_seconds))
    print(listener.getsockname()[1], flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
