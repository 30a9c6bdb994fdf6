"""The HTTP surface of a replica that predicts: arrays in, arrays out.

Owns `/v1/predict`, its status codes and the shapes of its answers. Knows nothing of Ray and nothing of jax. The one
decision: the answer is written as the question was, JSON for people and `.npy` or `.npz` for programs.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.serving.batch_client import ask
from pipeline.serving.batch_request import BatchRequest, Row
from pipeline.serving.engine_thread import EngineUnavailable
from pipeline.serving.http_routes import aside, make_application, read_body, unavailable, until_disconnect
from pipeline.serving.json_body import Rejected
from pipeline.serving.micro_batcher import MicroBatcher
from pipeline.serving.predict_request import (
    MAX_PREDICT_BYTES,
    MediaType,
    PredictModel,
    PredictRequest,
    not_finite,
    parse_prediction,
    write_arrays,
)


@dataclass(kw_only=True)
class PredictSurface:
    """What the application answers from."""

    engine: MicroBatcher
    model: PredictModel
    facts: Mapping[str, Any]
    """Of the deployment; part of `/health`."""
    drain_seconds: float = 30.0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    @property
    def card(self) -> Mapping[str, Any]:
        """What `/v1/models` says of it: everything a client needs to write a request."""
        return {
            "inputs": {
                name: {"shape": ["rows", *form.shape], "dtype": form.dtype} for name, form in self.model.inputs.items()
            },
            "outputs": {name: {"shape": ["rows", *shape]} for name, shape in self.model.outputs.items()},
            "max_rows": self.model.max_rows,
        }


def make_predict_app(surface: PredictSurface) -> Starlette:
    """The application; every error has OpenAI's body."""
    return make_application(surface, routes=[Route("/v1/predict", _predict, methods=["POST"])])


async def _predict(request: Request) -> Response:
    surface: PredictSurface = request.app.state.surface
    body = await read_body(request, max_bytes=MAX_PREDICT_BYTES)

    def judge() -> PredictRequest:
        return parse_prediction(
            body,
            content_type=request.headers.get("content-type", ""),
            accept=request.headers.get("accept", ""),
            model=surface.model,
        )

    parsed = await aside(judge, num_bytes=len(body))
    asked = BatchRequest(request_id=f"pred-{uuid.uuid4().hex}", rows=_rows(parsed))
    try:
        answer = await until_disconnect(request, ask(surface.engine, asked))
    except EngineUnavailable as error:
        raise unavailable(str(error)) from error
    if answer.error:
        raise Rejected(f"the request failed: {answer.error}", status=500)
    outputs = answer.stacked()

    def write() -> Response:
        if parsed.answer is not MediaType.JSON:
            return Response(write_arrays(outputs, media_type=parsed.answer), media_type=parsed.answer)
        return _json(outputs, request_id=asked.request_id, surface=surface)

    return await aside(write, num_bytes=sum(array.nbytes for array in outputs.values()))


def _rows(parsed: PredictRequest) -> list[Row]:
    return [
        Row(inputs={name: array[index] for name, array in parsed.inputs.items()}) for index in range(parsed.num_rows)
    ]


def _json(outputs: Mapping[str, NDArray[Any]], *, request_id: str, surface: PredictSurface) -> Response:
    bad = not_finite(outputs)
    if bad:
        raise Rejected(
            f"the model gave numbers that are not finite in {', '.join(bad)}, which JSON cannot write; accept "
            f"{MediaType.NPZ} to see them",
            status=500,
        )
    return JSONResponse(
        {
            "id": request_id,
            "object": "prediction",
            "created": int(time.time()),
            "model": surface.name,
            "outputs": {name: array.tolist() for name, array in outputs.items()},
        }
    )
