"""From a model directory to a warm engine behind an ASGI application.

Owns the order of loading. Knows nothing of Ray. The one decision: a replica is ready when its constructor returns:
everything is read, checked, placed and compiled, or the error that says why not has been raised.
"""

import hashlib
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from starlette.applications import Starlette
from tokenizers import Tokenizer

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.checkpoint import load_model
from pipeline.models.config_file import read_config
from pipeline.models.decoders.model import Decoder
from pipeline.serving.buckets import Buckets
from pipeline.serving.completion_request import ServedModel
from pipeline.serving.device import choose_placement
from pipeline.serving.engine import Engine
from pipeline.serving.executor import ModelExecutor
from pipeline.serving.http import Surface, make_app
from pipeline.serving.metrics import Metrics
from pipeline.serving.replica_settings import ReplicaSettings
from pipeline.serving.scheduler import Limits

TOKENIZER_FILE = "tokenizer.json"


class Replica:
    """One served model; `app` answers."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Load, check, compile.

        Raises:
            ArtifactError: the model directory is damaged, or its tokenizer does not fit the vocabulary.
            ParameterError: the device does not exist, or the context is longer than the model's.
            EngineUnavailable: warm-up failed.
        """
        started = time.monotonic()
        if settings.compilation_cache is not None:
            _use_compilation_cache(settings.compilation_cache)
        device, placement = choose_placement(device=settings.device, dtype=settings.dtype)
        directory = Path(settings.model_path)
        config = read_config(directory)
        tokenizer = read_tokenizer(directory, num_tokens=int(config.get("vocab_size", 0)))
        with jax.default_device(device):
            model = load_model(directory, dtype=placement.dtype)
        if not isinstance(model, Decoder):
            raise ParameterError(
                f"{directory}: a {type(model).__name__} does not generate text one token at a time",
                hint="serve a decoder-only language model",
            )
        limits = Limits(
            slots=settings.slots,
            context=settings.context,
            chunk_tokens=min(settings.prefill_chunk_tokens, settings.context),
            decode_steps=settings.decode_steps,
        )
        _check_context(limits, model)
        buckets = Buckets.for_limits(slots=limits.slots, context=limits.context, chunk_tokens=limits.chunk_tokens)
        with jax.default_device(device):
            executor = ModelExecutor(model, limits=limits, buckets=buckets, device=device, dtype=placement.dtype)
        self.engine = Engine(executor, decoder=tokenizer, limits=limits, metrics=Metrics(model=settings.name))
        self.engine.start()
        self.facts = {
            "name": settings.name,
            "digest": settings.digest,
            "version": settings.version,
            "deployment_id": settings.deployment_id,
            "device": placement.device,
            "device_reason": placement.device_reason,
            "dtype": placement.dtype,
            "dtype_reason": placement.dtype_reason,
            "context_tokens": limits.context,
            "num_executables": buckets.num_executables,
            "warm_up_seconds": round(self.engine.warm_up_seconds, 3),
            "start_seconds": round(time.monotonic() - started, 3),
        }
        self.app = self._make_app(settings, model, tokenizer, config)

    def check_health(self) -> None:
        """Raise where the engine has failed or stalls; Ray Serve then replaces the replica."""
        failure = self.engine.status().failure
        if failure is not None:
            raise RuntimeError(failure)

    def _make_app(
        self, settings: ReplicaSettings, model: Decoder, tokenizer: Tokenizer, config: Mapping[str, Any]
    ) -> Starlette:
        served = ServedModel(
            name=settings.name,
            context=self.engine.limits.context,
            num_tokens=model.config.vocab_size,
            stop_ids=stop_ids_of(config),
        )
        return make_app(
            Surface(engine=self.engine, encoder=tokenizer, decoder=tokenizer, model=served, facts=self.facts)
        )


def read_tokenizer(directory: Path, *, num_tokens: int) -> Tokenizer:
    """`tokenizer.json` of a model directory, without padding and truncation.

    Raises:
        ArtifactError: it is missing or unreadable, or gives tokens that the model does not have.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a model directory has its tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file
        raise ArtifactError(f"{path}: cannot be read as a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= num_tokens:
        raise ArtifactError(
            f"{path}: gives tokens up to {highest}, but the model's vocabulary has {num_tokens}",
            hint="the tokenizer belongs to another model",
        )
    return tokenizer


def stop_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-text tokens of a transformers config: one, several or none."""
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _check_context(limits: Limits, model: Decoder) -> None:
    longest = model.config.longest_context
    if limits.context > longest:
        raise ParameterError(
            f"max_context_tokens is {limits.context}, but the model can be served with {longest} positions",
            hint=f"use at most {longest}",
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
