"""The door of a process: without a known key, nothing but `/health` and `/ready` answers.

Owns the 401. Knows nothing of what lies behind. The one decision: the key is judged before a path or a body is looked
at, so that who has none learns nothing; which of several models a key opens is judged where the model is known.
"""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.serving.http.api_keys import bearer_digest
from pipeline.serving.http.model_registry import ModelRegistry
from pipeline.serving.json_body import Rejected

OPEN_PATHS = ("/health", "/ready")
_DIGEST = "pipeline.key_digest"


class KeyGate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, registry: ModelRegistry) -> None:
        self._app = app
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the digest of the key in the scope, or answer 401."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        authorization = Headers(scope=scope).get("authorization", "")
        digest = bearer_digest(authorization)
        surfaces = self._registry.surfaces
        # All are asked, so that the time does not tell which model the key belongs to.
        opens = [surface.access.allows(digest) for surface in surfaces if not surface.access.is_open]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if opens and not any(opens) and path not in OPEN_PATHS:
            self._registry.metrics.count("rejected_requests_total", label="401")
            found = "an unknown key" if digest is not None else "no key"
            error = Rejected(
                f"{found}; send a key of this server as `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )
            response = JSONResponse(error.body(), status_code=401, headers={"WWW-Authenticate": "Bearer"})
            return await response(scope, receive, send)
        return await self._app({**scope, _DIGEST: digest}, receive, send)


def key_digest(scope: Scope) -> str | None:
    """Digest of the key that came with a request."""
    digest: str | None = scope.get(_DIGEST)
    return digest
