"""A model that predicts: arrays in, arrays out.

Owns the way from a loaded model to a micro-batcher behind `/v1/predict`. Knows nothing of Ray.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.serving.engine.forward_executor import ForwardExecutor, ForwardShapes, batch_sizes
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.micro_batcher import BatchLimits, MicroBatcher
from pipeline.serving.engine.passes import PassShapes
from pipeline.serving.hosting.served_model import LoadedModel, ServedModel
from pipeline.serving.http.access import access_of
from pipeline.serving.http.input_forms import row_forms
from pipeline.serving.http.model_registry import Surface
from pipeline.serving.http.predict_http import PredictSurface
from pipeline.serving.http.predict_request import MAX_PREDICT_BYTES, PredictModel

ENDPOINT = "predict"
MAX_ROWS = 1024
"""Of one request; more would hold up everybody else's."""


def serve_predictions(loaded: LoadedModel) -> ServedModel:
    """Compile and start the micro-batcher.

    Raises:
        ParameterError: a size beside the batch is open and not given, or an output has no batch axis.
        EngineUnavailable: warm-up failed.
    """
    settings, description = loaded.settings, loaded.description
    shapes = ForwardShapes(
        inputs=row_forms(description, dimensions=settings.dimensions),
        passes=PassShapes(batches=batch_sizes(settings.max_batch_rows)),
    )
    executor = ForwardExecutor(
        loaded.module,
        forward=description.forward,
        shapes=shapes,
        device=loaded.device,
        dtype=loaded.placement.dtype,
    )
    limits = BatchLimits(max_batch_rows=settings.max_batch_rows, wait_seconds=settings.batch_wait_seconds)
    engine = MicroBatcher(executor, limits=limits, metrics=Metrics(model=settings.name))
    engine.version = settings.version_label
    engine.start()
    model = PredictModel(name=settings.name, inputs=shapes.inputs, outputs=executor.outputs, max_rows=MAX_ROWS)

    def surface(facts: Mapping[str, Any]) -> Surface:
        access = access_of(settings, max_request_bytes=MAX_PREDICT_BYTES)
        return PredictSurface(engine=engine, model=model, facts=facts, access=access)

    facts = {
        "max_batch_rows": limits.max_batch_rows,
        "num_executables": executor.num_executables,
        "warm_up_seconds": round(engine.warm_up_seconds, 3),
    }
    return ServedModel(
        engine=engine,
        endpoint=ENDPOINT,
        facts=facts,
        make_surface=surface,
        leaves_of=executor.leaves_of,
        swap=lambda leaves, label: engine.swap(leaves, label=label),
    )
