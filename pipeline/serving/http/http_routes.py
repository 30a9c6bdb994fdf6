"""What every process that serves answers, whatever its models do.

Owns the routes, the way of a request to its model, `/v1/models`, `/health`, `/ready` and `/metrics`, and the error
bodies. Knows nothing of jax or of what an endpoint computes. The one decision: a client that goes away cancels its
work, and every error has OpenAI's body and comes before the first byte.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipeline.serving.engine.metrics import render
from pipeline.serving.http.access import Meter
from pipeline.serving.http.key_gate import KeyGate, key_digest
from pipeline.serving.http.model_registry import NAMELESS_PATHS, WORK_PATHS, Asked, ModelRegistry, Surface
from pipeline.serving.http.rate_limits import RateLimited
from pipeline.serving.json_body import Rejected, json_object
from pipeline.serving.traffic.traffic_split import TrafficSplit

RETRY_AFTER_SECONDS = "1"
_BYTES_AT_ONCE = 64 * 2**10
"""JSON of this size is read in about 1 ms; a thread costs 0.1 ms."""
TEXT_AT_ONCE = 4 * 2**10
"""Text of this size becomes tokens in about 2 ms, of 64 KiB in 22."""
_JSON_TYPES = ("", "application/json")
ResultT = TypeVar("ResultT")


def make_application(registry: ModelRegistry) -> Starlette:
    """The application of a process; every error has OpenAI's body. Its shutdown drains all engines."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        yield
        await registry.drain()

    app = Starlette(
        routes=[
            Route("/v1/models", _models, methods=["GET"]),
            Route("/v1/models/{name:path}", _model, methods=["GET"]),
            *(Route(path, _worker(path), methods=["POST"]) for path in WORK_PATHS),
            Route("/health", _health, methods=["GET"]),
            Route("/ready", _ready, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
        ],
        lifespan=lifespan,
        middleware=[Middleware(KeyGate, registry=registry), Middleware(TrafficSplit, traffic=registry.traffic)],
        exception_handlers={
            Rejected: _on_rejected,
            RateLimited: _on_rate_limited,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_fault,
        },
    )
    app.state.registry = registry
    return app


def _worker(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def work(request: Request) -> Response:
        registry: ModelRegistry = request.app.state.registry
        body, fields = await _read(request, path=path)
        surface = None
        while True:
            before, surface = surface, _surface_of(request, body=body, fields=fields, path=path)
            asked = Asked(request=request, body=body, fields=fields, meter=_meter(request, surface))
            try:
                response = await surface.endpoints[path](asked)
            except BaseException as error:
                if asked.meter.admission is not None:
                    asked.meter.admission.settle(0)
                # A model that was replaced between its choice and its engine's answer: nothing was sent yet.
                is_replaced = surface is not before and all(held is not surface for held in registry.surfaces)
                if is_replaced and isinstance(error, Rejected) and error.status == 503:
                    continue
                raise
            if asked.meter.admission is not None:
                response.headers.update(asked.meter.admission.headers)
            return response

    return work


async def _read(request: Request, *, path: str) -> tuple[bytes, dict[str, Any] | None]:
    """The body, and its fields where it is JSON.

    Raises:
        Rejected: the body is too large or no JSON object.
    """
    registry: ModelRegistry = request.app.state.registry
    limits = [surface.access.max_request_bytes for surface in registry.surfaces if path in surface.endpoints]
    body = await read_body(request, max_bytes=max(limits, default=0) or _BYTES_AT_ONCE)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if path in NAMELESS_PATHS and content_type not in _JSON_TYPES:
        return body, None
    return body, await aside(lambda: json_object(body), num_bytes=len(body))


def _surface_of(request: Request, *, body: bytes, fields: Mapping[str, Any] | None, path: str) -> Surface:
    """The model that a body names.

    Raises:
        Rejected: it is not here, or takes no body as long.
    """
    registry: ModelRegistry = request.app.state.registry
    name = request.query_params.get("model") if fields is None else fields.get("model")
    surface = registry.find(name, path=path, digest=key_digest(request.scope))
    request.state.surface = surface
    if len(body) > surface.access.max_request_bytes:
        raise _too_large(len(body), allowed=surface.access.max_request_bytes)
    return surface


def _meter(request: Request, surface: Surface) -> Meter:
    digest = key_digest(request.scope)
    client = digest if digest is not None and not surface.access.is_open else ""
    return Meter(surface.access.limits, client=client)


async def _models(request: Request) -> Response:
    registry: ModelRegistry = request.app.state.registry
    cards = [_model_card(surface) for surface in registry.allowed(key_digest(request.scope))]
    return JSONResponse({"object": "list", "data": cards})


async def _model(request: Request) -> Response:
    registry: ModelRegistry = request.app.state.registry
    return JSONResponse(_model_card(registry.named(request.path_params["name"], digest=key_digest(request.scope))))


async def _health(request: Request) -> Response:
    """Of the process; with one model, its facts stand at the top, and always under its name."""
    registry: ModelRegistry = request.app.state.registry
    models = {surface.name: _health_of(surface) for surface in registry.surfaces}
    failures = [f"{name}: {body['failure']}" for name, body in models.items() if body["failure"] is not None]
    body: dict[str, Any] = next(iter(models.values())) if len(models) == 1 else {}
    if len(models) != 1:
        body = {
            "status": "failed" if failures else "ok",
            "failure": "; ".join(failures) or None,
            **{name: sum(model[name] for model in models.values()) for name in _COUNTS},
        }
    return JSONResponse({**body, "models": models}, status_code=503 if failures else 200)


_COUNTS = ("running", "waiting", "compiles_while_serving")


def _health_of(surface: Surface) -> dict[str, Any]:
    status = surface.engine.status()
    return {
        "status": "ok" if status.failure is None else "failed",
        "failure": status.failure,
        **surface.facts,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "compiles_while_serving": status.num_compiles_while_serving,
    }


async def _ready(request: Request) -> Response:
    registry: ModelRegistry = request.app.state.registry
    models = {surface.name: surface.engine.status().is_ready for surface in registry.surfaces}
    is_ready = bool(models) and all(models.values()) and not registry.is_draining
    return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)


async def _metrics(request: Request) -> Response:
    registry: ModelRegistry = request.app.state.registry
    text = render([registry.metrics, *(surface.engine.metrics for surface in registry.surfaces)])
    return PlainTextResponse(text + registry.traffic.render(), media_type="text/plain; version=0.0.4")


async def read_body(request: Request, *, max_bytes: int) -> bytes:
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
        raise _too_large(size, allowed=max_bytes)
    return b"".join(parts)


def _too_large(size: int, *, allowed: int) -> Rejected:
    return Rejected(f"the body has {size} bytes or more; {allowed} are allowed", status=413)


async def aside(act: Callable[[], ResultT], *, num_bytes: int, at_once: int = _BYTES_AT_ONCE) -> ResultT:
    """What `act` gives; in a thread where it handles many bytes, so that other clients' requests go on meanwhile."""
    return act() if num_bytes <= at_once else await asyncio.to_thread(act)


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


def _refused(request: Request, error: Rejected, *, headers: Mapping[str, str] | None = None) -> Response:
    surface: Surface | None = getattr(request.state, "surface", None)
    metrics = request.app.state.registry.metrics if surface is None else surface.engine.metrics
    metrics.count("rejected_requests_total", label=str(error.status))
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    del error  # Starlette raises it again behind the answer, so that the server's log has it
    return _refused(request, Rejected("the server failed; its log says why", status=500))


async def _on_rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if error.status == 503 else None
    return _refused(request, error, headers=headers)


async def _on_rate_limited(request: Request, error: Exception) -> Response:
    assert isinstance(error, RateLimited)
    headers = dict(error.headers)
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    return _refused(request, Rejected(str(error), status=429, code="rate_limit_exceeded"), headers=headers)


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
