"""The HTTP surface of a replica that embeds text.

Owns `/v1/embeddings`, its status codes and the shapes of OpenAI's answers. Knows nothing of Ray and nothing of jax.
"""

import base64
import functools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from pipeline.serving.engine.batch_client import ask
from pipeline.serving.engine.batch_request import BatchRequest, Row
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.micro_batcher import MicroBatcher
from pipeline.serving.http.access import Access
from pipeline.serving.http.completion_request import Encoder
from pipeline.serving.http.embedding_request import EmbeddingModel, EmbeddingRequest, parse_embedding
from pipeline.serving.http.http_routes import TEXT_AT_ONCE, aside, unavailable, until_disconnect
from pipeline.serving.http.model_registry import EMBEDDINGS, Asked, Handler
from pipeline.serving.json_body import Rejected

EMBEDDING = "embedding"
"""The executor's one output."""


@dataclass(kw_only=True)
class EmbeddingSurface:
    """What the application answers from."""

    engine: MicroBatcher
    encoder: Encoder
    model: EmbeddingModel
    facts: Mapping[str, Any]
    """Of the deployment; part of `/health`."""
    access: Access = field(default_factory=Access)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    @property
    def card(self) -> Mapping[str, Any]:
        """What `/v1/models` says of it."""
        return {"max_model_len": self.model.max_tokens, "dimensions": self.model.size}

    @property
    def endpoints(self) -> Mapping[str, Handler]:
        """What it answers."""
        return {EMBEDDINGS: functools.partial(_embeddings, self)}


async def _embeddings(surface: EmbeddingSurface, asked: Asked) -> Response:
    assert asked.fields is not None
    fields = asked.fields

    def judge() -> EmbeddingRequest:
        return parse_embedding(fields, model=surface.model, encoder=surface.encoder)

    parsed = await aside(judge, num_bytes=len(asked.body), at_once=TEXT_AT_ONCE)
    num_tokens = sum(map(len, parsed.texts))
    asked.meter.admit(num_tokens=num_tokens)
    rows = [_token_row(tokens) for tokens in parsed.texts]
    batch = BatchRequest(request_id=f"embd-{uuid.uuid4().hex}", rows=rows)
    try:
        answer = await until_disconnect(asked.request, ask(surface.engine, batch))
    except EngineUnavailable as error:
        raise unavailable(str(error)) from error
    if answer.error:
        raise Rejected(f"the request failed: {answer.error}", status=500)
    vectors = [row[EMBEDDING] for row in answer.rows]
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise Rejected("the model gave numbers that are not finite", status=500)
    surface.engine.metrics.count("prompt_tokens_total", num_tokens)
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(vector, is_base64=parsed.is_base64)}
                for index, vector in enumerate(vectors)
            ],
            "model": surface.name,
            "system_fingerprint": answer.version or None,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _token_row(tokens: tuple[int, ...]) -> Row:
    """A text as a row: its tokens, and a mask that padding leaves at 0."""
    ids = np.asarray(tokens, np.int32)
    return Row(inputs={"input_ids": ids, "attention_mask": np.ones_like(ids)}, length=len(tokens))


def _written(vector: NDArray[np.float32], *, is_base64: bool) -> Any:
    """A list of numbers, or base64 of little-endian float32, as OpenAI writes them."""
    if is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
