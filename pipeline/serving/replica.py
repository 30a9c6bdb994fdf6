"""From a model directory to a warm model behind an ASGI application.

Owns the order of loading, and which way of serving a model takes. Knows nothing of Ray. The one decision: a replica is
ready when its constructor returns: everything is read, checked, placed and compiled, or the error that says why not
has been raised.
"""

import hashlib
import platform
import time
from pathlib import Path

import jax
import jaxlib

from pipeline.errors import ParameterError
from pipeline.models.checkpoint import load_model
from pipeline.models.decoders.model import Decoder
from pipeline.models.description import ModelKind
from pipeline.models.registry import describe
from pipeline.serving.completion_replica import serve_completions
from pipeline.serving.device import choose_placement
from pipeline.serving.embedding_replica import serve_embeddings
from pipeline.serving.predict_replica import serve_predictions
from pipeline.serving.replica_settings import ReplicaSettings
from pipeline.serving.served_model import LoadedModel, ServedModel

_PREDICTING = (ModelKind.PREDICTOR, ModelKind.IMAGE)


class Replica:
    """One served model; `app` answers."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Load, check, compile.

        Raises:
            ArtifactError: the model directory is damaged, or its tokenizer does not fit the vocabulary.
            ParameterError: the device does not exist, the model is of a kind that is not served, or a setting does not
                fit it.
            EngineUnavailable: warm-up failed.
        """
        started = time.monotonic()
        if settings.compilation_cache is not None:
            _use_compilation_cache(settings.compilation_cache)
        device, placement = choose_placement(device=settings.device, dtype=settings.dtype)
        directory = Path(settings.model_path)
        description = describe(directory)
        with jax.default_device(device):
            module = load_model(directory, dtype=placement.dtype)
        served = serve(
            LoadedModel(
                settings=settings,
                directory=directory,
                description=description,
                module=module,
                device=device,
                placement=placement,
            )
        )
        self.engine = served.engine
        self.facts = {
            "name": settings.name,
            "digest": settings.digest,
            "version": settings.version,
            "deployment_id": settings.deployment_id,
            "endpoint": served.endpoint,
            "device": placement.device,
            "device_reason": placement.device_reason,
            "dtype": placement.dtype,
            "dtype_reason": placement.dtype_reason,
            **served.facts,
            "start_seconds": round(time.monotonic() - started, 3),
        }
        self.app = served.make_app(self.facts)

    def check_health(self) -> None:
        """Raise where the engine has failed or stalls; Ray Serve then replaces the replica."""
        failure = self.engine.status().failure
        if failure is not None:
            raise RuntimeError(failure)


def serve(loaded: LoadedModel) -> ServedModel:
    """Compile and start what fits the model.

    Raises:
        ParameterError: models of this kind are not served.
    """
    kind = loaded.description.kind
    if isinstance(loaded.module, Decoder):
        return serve_completions(loaded)
    if kind is ModelKind.TEXT_ENCODER:
        return serve_embeddings(loaded)
    if kind in _PREDICTING:
        return serve_predictions(loaded)
    raise ParameterError(
        f"{loaded.directory}: a {kind.value} model ({loaded.description.name}) is not served",
        hint="served are decoders of a family (/v1/completions), text encoders (/v1/embeddings), and models of images "
        "or other arrays (/v1/predict)",
    )


def _use_compilation_cache(directory: str) -> None:
    """A second start then compiles nothing: 5 s instead of 23 s measured on two busy cores."""
    # Machine code for another processor or jaxlib must not be loaded, so each has a directory of its own.
    identity = f"{jaxlib.__version__} {platform.machine()} {_processor_flags()}"
    own = Path(directory) / hashlib.sha256(identity.encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(own))
    # The defaults keep only what took over a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
