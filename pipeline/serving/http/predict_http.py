"""The HTTP surface of a replica that predicts: arrays in, arrays out.

Owns `/v1/predict`, its status codes and the shapes of its answers. Knows nothing of Ray and nothing of jax. The one
decision: the answer is written as the question was, JSON for people and `.npy` or `.npz` for programs.
"""

import functools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from pipeline.serving.engine.batch_client import ask
from pipeline.serving.engine.batch_request import BatchRequest, Row
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.micro_batcher import MicroBatcher
from pipeline.serving.http.access import Access
from pipeline.serving.http.http_routes import aside, unavailable, until_disconnect
from pipeline.serving.http.model_registry import PREDICT, Asked, Handler
from pipeline.serving.http.predict_request import (
    MAX_PREDICT_BYTES,
    MediaType,
    PredictModel,
    PredictRequest,
    not_finite,
    parse_prediction,
    write_arrays,
)
from pipeline.serving.json_body import Rejected


@dataclass(kw_only=True)
class PredictSurface:
    """What the application answers from."""

    engine: MicroBatcher
    model: PredictModel
    facts: Mapping[str, Any]
    """Of the deployment; part of `/health`."""
    access: Access = field(default_factory=lambda: Access(usual_request_bytes=MAX_PREDICT_BYTES))
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

    @property
    def endpoints(self) -> Mapping[str, Handler]:
        """What it answers."""
        return {PREDICT: functools.partial(_predict, self)}


async def _predict(surface: PredictSurface, asked: Asked) -> Response:
    request = asked.request

    def judge() -> PredictRequest:
        return parse_prediction(
            asked.body if asked.fields is None else asked.fields,
            content_type=request.headers.get("content-type", ""),
            accept=request.headers.get("accept", ""),
            model=surface.model,
        )

    parsed = await aside(judge, num_bytes=len(asked.body))
    asked.meter.admit(num_tokens=parsed.num_rows)
    batch = BatchRequest(request_id=f"pred-{uuid.uuid4().hex}", rows=_rows(parsed))
    try:
        answer = await until_disconnect(request, ask(surface.engine, batch))
    except EngineUnavailable as error:
        raise unavailable(str(error)) from error
    if answer.error:
        raise Rejected(f"the request failed: {answer.error}", status=500)
    outputs = answer.stacked()

    def write() -> Response:
        if parsed.answer is not MediaType.JSON:
            return Response(write_arrays(outputs, media_type=parsed.answer), media_type=parsed.answer)
        return _json(outputs, request_id=batch.request_id, version=answer.version, surface=surface)

    return await aside(write, num_bytes=sum(array.nbytes for array in outputs.values()))


def _rows(parsed: PredictRequest) -> list[Row]:
    return [
        Row(inputs={name: array[index] for name, array in parsed.inputs.items()}) for index in range(parsed.num_rows)
    ]


def _json(outputs: Mapping[str, NDArray[Any]], *, request_id: str, version: str, surface: PredictSurface) -> Response:
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
            "system_fingerprint": version or None,
            "outputs": {name: array.tolist() for name, array in outputs.items()},
        }
    )
