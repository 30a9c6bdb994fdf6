"""The endpoints of a model that completes text.

Owns which there are. Knows nothing of Ray and nothing of jax. The one decision: an application is complete in itself,
so it is the replica's ingress under Ray Serve and runs under any ASGI server.
"""

import functools
from typing import Any

from starlette.applications import Starlette

from pipeline.serving.http import chat_http, completion_http
from pipeline.serving.http.http_routes import make_application
from pipeline.serving.http.model_registry import CHAT, COMPLETIONS, ModelRegistry, Surface
from pipeline.serving.http.text_surface import TextSurface


def make_surface(**given: Any) -> TextSurface:
    """A `TextSurface` with its endpoints; takes its fields."""
    surface = TextSurface(**given)
    surface.endpoints = {
        COMPLETIONS: functools.partial(completion_http.complete, surface),
        CHAT: functools.partial(chat_http.chat, surface),
    }
    return surface


def make_app(*surfaces: Surface) -> Starlette:
    """The application of a process that serves these alone."""
    return make_application(ModelRegistry(surfaces))
