"""From a loaded decoder to executors and the engine, or engines, over them.

Owns how a mesh becomes executors: one for each copy of the model, with its share of the slots. Knows nothing of text or
HTTP.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from pipeline.models.decoders.model import Decoder as DecoderModel
from pipeline.models.packed.attention import can_read_in_place
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.accelerator.multi_host import Leader
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.detokenizer import Decoder
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.engine_group import EngineGroup, shared_metrics
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.served_parameters import is_packed
from pipeline.serving.hosting.served_model import LoadedModel


def make_executors(loaded: LoadedModel, *, limits: Limits) -> list[ModelExecutor]:
    """One for each copy of the model; the copies after the first are read now.

    Raises:
        ArtifactError: the model directory is damaged.
    """
    limits = replace(limits, slots=limits.slots // len(loaded.meshes))
    made = []
    for index, mesh in enumerate(loaded.meshes):
        with jax.default_device(mesh.own_device):
            module = loaded.module if index == 0 else loaded.load(mesh)
            assert isinstance(module, DecoderModel)
            made.append(executor_on(mesh, module, limits=limits, dtype=loaded.placement.compute_dtype))
    return made


def executor_on(mesh: ServingMesh, module: DecoderModel, *, limits: Limits, dtype: str) -> ModelExecutor:
    """The executor of a model, which is taken over, on a mesh; the same arguments give the same executables."""
    buckets = Buckets.for_limits(
        slots=limits.slots,
        context=limits.context,
        chunk_tokens=limits.chunk_tokens,
        copies_prefixes=limits.prefix_granularity > 0,
        is_deterministic=limits.is_deterministic,
        reads_in_place=is_packed(module, mesh=mesh, dtype=dtype) and can_read_in_place(module.config),
        has_experts=module.config.experts is not None,
    )
    return ModelExecutor(module, limits=limits, buckets=buckets, mesh=mesh, dtype=dtype)


def make_engine(
    executors: Sequence[ModelExecutor], *, decoder: Decoder, metrics: Metrics, leader: Leader | None = None
) -> Engine | EngineGroup:
    """The engine over one executor, or the engines over several, not yet started.

    With a `leader` the other hosts make the executor's calls too, and the engine ends with a reason where one is lost.
    """
    if len(executors) == 1:
        engine = Engine(executors[0], decoder=decoder, limits=executors[0].limits, metrics=metrics)
        if leader is not None:
            leader.lead(executors[0])
            engine.explain, engine.on_end = leader.why, leader.end
            leader.on_lost(engine.fail)
        return engine
    assert leader is None, "a model over several hosts has one copy"
    parts = shared_metrics(metrics, size=len(executors))
    engines = [
        Engine(executor, decoder=decoder, limits=executor.limits, metrics=own)
        for executor, own in zip(executors, parts, strict=True)
    ]
    return EngineGroup(engines, metrics=metrics)
