"""The models that one process serves, by name.

Owns which model answers a request. Knows nothing of what a model computes. The one decision: a request goes to the
model that its body names, as with OpenAI, so one address serves all models of a process, and models come and go
without another application.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from pipeline.serving.engine.engine_thread import ServingEngine
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.http.access import Access, Meter
from pipeline.serving.json_body import Rejected, shown
from pipeline.serving.traffic.traffic_split import Traffic

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
PREDICT = "/v1/predict"
WORK_PATHS = (COMPLETIONS, CHAT, EMBEDDINGS, PREDICT)
"""What models answer."""
NAMELESS_PATHS = (PREDICT,)
"""Where a body need not name its model, because an array cannot: the query's `model` does, or there is one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request whose body was read."""

    request: Request
    body: bytes
    fields: Mapping[str, Any] | None
    """The body as a JSON object; None where it is of another type."""
    meter: Meter


Handler = Callable[[Asked], Awaitable[Response]]


class Surface(Protocol):
    """A model as clients see it."""

    @property
    def engine(self) -> ServingEngine:
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
    def access(self) -> Access:
        """Who may ask, and how much."""
        ...

    @property
    def endpoints(self) -> Mapping[str, Handler]:
        """What it answers, by path."""
        ...


class ModelRegistry:
    """Surfaces by name; may change while requests run."""

    def __init__(
        self,
        surfaces: Iterable[Surface] = (),
        *,
        drain_seconds: float = 30.0,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        """Begin with some models, or with none.

        Args:
            surfaces: of the models.
            drain_seconds: how long a shutdown waits for what runs.
            on_shutdown: stops the engines in place of the registry, and blocks until they have.
        """
        self.drain_seconds = drain_seconds
        self._on_shutdown = on_shutdown
        self.is_draining = False
        self.metrics = Metrics(model="", names=("rejected_requests_total",))
        """Of requests that were refused before their model was known."""
        self.traffic = Traffic()
        """Where requests go beside this process."""
        self._surfaces: Mapping[str, Surface] = {surface.name: surface for surface in surfaces}

    @property
    def surfaces(self) -> tuple[Surface, ...]:
        """All of them, in the order they came."""
        return tuple(self._surfaces.values())

    def show(self, surfaces: Iterable[Surface]) -> None:
        """Serve these and no others from now on; what runs goes on, and engines are the caller's to stop.

        One assignment, so a request meets either the old models or the new ones.
        """
        self._surfaces = {surface.name: surface for surface in surfaces}

    async def drain(self) -> None:
        """Take nothing new, and stop every engine when its requests have ended or the time is over."""
        self.is_draining = True
        if self._on_shutdown is not None:
            await asyncio.to_thread(self._on_shutdown)
            return
        stops = (asyncio.to_thread(surface.engine.stop, drain_seconds=self.drain_seconds) for surface in self.surfaces)
        await asyncio.gather(*stops)

    def allowed(self, digest: str | None) -> tuple[Surface, ...]:
        """The models that the holder of a key may ask."""
        return tuple(surface for surface in self.surfaces if surface.access.allows(digest))

    def find(self, name: object, *, path: str, digest: str | None) -> Surface:
        """The model of that name that answers at `path`; the only one where `name` is None and the path allows it.

        Raises:
            Rejected: 400 where no name is given or the model does not answer there, 404 where it does not exist.
        """
        answering = [surface for surface in self.allowed(digest) if path in surface.endpoints]
        listed = ", ".join(repr(surface.name) for surface in answering) or "none"
        if name is None and path in NAMELESS_PATHS and len(answering) == 1:
            return answering[0]
        if name is None and answering:
            raise Rejected(f"model: missing; {path} has {listed}", param="model")
        if name is not None and not isinstance(name, str):
            raise Rejected(f"model: must be a string, found {shown(name)}", param="model")
        surface = self.named(name, digest=digest, listed=listed) if name is not None else None
        if surface is None or path not in surface.endpoints:
            which = f"the model {name!r} answers {', '.join(surface.endpoints)}, not {path}" if surface else ""
            raise Rejected(
                which or f"no model of this server answers {path}", status=400 if surface else 404, param="model"
            )
        return surface

    def named(self, name: str, *, digest: str | None, listed: str = "") -> Surface:
        """The model of that name.

        Raises:
            Rejected: 404.
        """
        surface = self._surfaces.get(name)
        if surface is None or not surface.access.allows(digest):
            listed = listed or ", ".join(repr(found.name) for found in self.allowed(digest)) or "none"
            raise Rejected(
                f"the model {name!r} does not exist; this server has {listed}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return surface
