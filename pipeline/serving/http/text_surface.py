"""What the endpoints of a model that completes text answer from.

Owns that value. Knows nothing of the endpoints, of Ray or of jax.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.serving.engine.async_client import AsyncClient
from pipeline.serving.engine.detokenizer import Decoder
from pipeline.serving.engine.engine_group import TextEngine
from pipeline.serving.engine.request import Grammar
from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.http.access import Access
from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.completion_request import Encoder
from pipeline.serving.http.model_registry import Handler
from pipeline.serving.http.sampling_fields import ServedModel
from pipeline.serving.json_body import Rejected


@dataclass(kw_only=True)
class TextSurface:
    """A model that completes text, as clients see it."""

    engine: TextEngine
    encoder: Encoder
    decoder: Decoder
    model: ServedModel
    facts: Mapping[str, Any]
    """Of the deployment (`name`, `digest`, `version`, ...); part of `/health`."""
    template: ChatTemplate | None = None
    """None where the model has none."""
    compile_grammar: Callable[[Constraint], Awaitable[Grammar]] | None = None
    """Raises `Rejected`; None where texts cannot be constrained."""
    access: Access = field(default_factory=Access)
    endpoints: Mapping[str, Handler] = field(default_factory=dict)
    """What it answers, by path."""
    created: int = field(default_factory=lambda: int(time.time()))
    client: AsyncClient | None = None

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    @property
    def card(self) -> Mapping[str, Any]:
        """What `/v1/models` says of it."""
        return {"max_model_len": self.model.context}

    def connected(self) -> AsyncClient:
        """The bridge to the loop that serves; made at the first request, which runs on it."""
        if self.client is None:
            self.client = AsyncClient(self.engine)
        return self.client

    async def compiled(self, constraint: Constraint | None) -> Grammar | None:
        """What holds a text to a constraint.

        Raises:
            Rejected: it cannot be compiled, or not in time.
        """
        if constraint is None:
            return None
        if self.compile_grammar is None:
            raise Rejected(f"{constraint.field}: this deployment does not constrain texts", param=constraint.field)
        return await self.compile_grammar(constraint)

    def envelope(self, answer_id: str, *, kind: str, created: int) -> dict[str, Any]:
        """What every body of an answer begins with."""
        return {
            "id": answer_id,
            "object": kind,
            "created": created,
            "model": self.name,
            "system_fingerprint": self.engine.version or None,
        }
