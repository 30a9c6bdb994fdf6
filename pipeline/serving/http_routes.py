"""What every replica answers, whatever its model does.

Owns the routes `/v1/models`, `/health`, `/ready` and `/metrics`, the error bodies, and the reading of request bodies.
Knows nothing of jax or of what an endpoint computes. The one decision: a client that goes away cancels its work, and
every error has OpenAI's body.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipeline.serving.engine_thread import EngineThread
from pipeline.serving.json_body import Rejected

MAX_BODY_BYTES = 4 * 2**20
RETRY_AFTER_SECONDS = "1"
_BYTES_AT_ONCE = 64 * 2**10
"""JSON of this size is read in about 1 ms; a thread costs 0.1 ms."""
ResultT = TypeVar("ResultT")


class Surface(Protocol):
    """What the common routes answer from."""

    @property
    def engine(self) -> EngineThread:
        """Where the work is done."""
        ...

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    @property
    def card(self) -> Mapping[str, Any]:
        """What `/v1/models` says of the model beyond its name."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the deployment (`name`, `digest`, `version`, ...); part of `/health`."""
        ...

    @property
    def created(self) -> int:
        """Seconds since the epoch."""
        ...

    @property
    def drain_seconds(self) -> float:
        """How long a shutdown waits for what runs."""
        ...


def make_application(surface: Surface, *, routes: Sequence[Route]) -> Starlette:
    """The application of a replica with its own `routes`; every error has OpenAI's body. Its shutdown drains."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        yield
        await asyncio.to_thread(surface.engine.stop, drain_seconds=surface.drain_seconds)

    app = Starlette(
        routes=[
            Route("/v1/models", _models, methods=["GET"]),
            Route("/v1/models/{name:path}", _model, methods=["GET"]),
            *routes,
            Route("/health", _health, methods=["GET"]),
            Route("/ready", _ready, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={Rejected: _on_rejected, HTTPException: _on_http_error, ClientDisconnect: _on_disconnect},
    )
    app.state.surface = surface
    return app


async def _models(request: Request) -> Response:
    surface: Surface = request.app.state.surface
    return JSONResponse({"object": "list", "data": [_model_card(surface)]})


async def _model(request: Request) -> Response:
    surface: Surface = request.app.state.surface
    name = request.path_params["name"]
    if name != surface.name:
        raise Rejected(f"the model {name!r} does not exist", status=404, param="model", code="model_not_found")
    return JSONResponse(_model_card(surface))


async def _health(request: Request) -> Response:
    surface: Surface = request.app.state.surface
    status = surface.engine.status()
    body = {
        "status": "ok" if status.failure is None else "failed",
        "failure": status.failure,
        **surface.facts,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "compiles_while_serving": status.num_compiles_while_serving,
    }
    return JSONResponse(body, status_code=200 if status.failure is None else 503)


async def _ready(request: Request) -> Response:
    is_ready = request.app.state.surface.engine.status().is_ready
    return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)


async def _metrics(request: Request) -> Response:
    text = request.app.state.surface.engine.metrics.render()
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body.

    Raises:
        Rejected: 413 where it is longer than `max_bytes`.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    parts: list[bytes] = []
    if size <= max_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > max_bytes:
                break
    if size > max_bytes:
        raise Rejected(f"the body has {size} bytes or more; {max_bytes} are allowed", status=413)
    return b"".join(parts)


async def aside(act: Callable[[], ResultT], *, num_bytes: int) -> ResultT:
    """What `act` gives; in a thread where it handles many bytes, so that other clients' requests go on meanwhile."""
    return act() if num_bytes <= _BYTES_AT_ONCE else await asyncio.to_thread(act)


async def until_disconnect(request: Request, answer: Awaitable[ResultT]) -> ResultT:
    """Await the answer, or cancel it when the client goes away."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientDisconnect
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def unavailable(reason: str) -> Rejected:
    """The answer of a replica that takes no request now."""
    return Rejected(reason, status=503)


async def _on_rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    request.app.state.surface.engine.metrics.count("rejected_requests_total", label=str(error.status))
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if error.status == 503 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = Rejected(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(found.body(), status_code=error.status_code, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)  # nobody reads it


def _model_card(surface: Surface) -> dict[str, Any]:
    return {
        "id": surface.name,
        "object": "model",
        "created": surface.created,
        "owned_by": "pipeline",
        **surface.card,
    }
