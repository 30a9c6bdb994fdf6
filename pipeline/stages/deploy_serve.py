"""`deploy.serve`: a Ray Serve deployment of the Flax model, proven by a request that came back.

Owns the order: judge what can be judged without a process, deploy, wait, ask. Loads no jax; only the replica does. The
one decision: the stage is done when a client got an answer over HTTP, in two forms that agree, from the very version
that was deployed.
"""

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.config_file import read_config
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.readers import READERS, read_decoder
from pipeline.serving.api_keys import read_key_digests
from pipeline.serving.memory import memory_need, why_too_big, why_weights_too_big
from pipeline.serving.ray_serve import (
    Endpoint,
    ReplicaResources,
    deploy,
    ensure_serving,
    wait_until_running,
)
from pipeline.serving.replica_settings import ReplicaSettings
from pipeline.serving.smoke import SmokeResult, smoke, wait_for_version
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import InputArtifact, StageContext, StageResult

DEFAULT_HOST = "127.0.0.1"
PROGRAM_FILE = "program.json"
"""Of a traced model."""
_SAID = (
    *("endpoint", "device", "device_reason", "dtype", "dtype_reason", "warm_up_seconds"),
    *("context_tokens", "dimensions", "pooling", "pooling_reason", "max_batch_rows"),
)
"""What `/health` says and the stage remembers, where the model has it."""


def run(context: StageContext[DeployServeParameters]) -> StageResult:
    """Deploy the model and leave it serving; writes `deployment/deployment.json`.

    Raises:
        ParameterError: the replicas cannot fit, the context is longer than the model's, or the port is not to be had.
        ArtifactError: the model directory is damaged, or its tokenizer does not fit.
        ClusterError: the replicas are not ready in time.
        StageError: a replica failed, or the smoke request did not bring an answer.
    """
    parameters, model = context.parameters, context.input("model")
    settings = _settings(context, model)
    resources = ReplicaResources(
        num_replicas=parameters.replicas, cpus=context.resources.cpus, gpus=context.resources.gpus or 0.0
    )
    started = time.monotonic()
    deadline = started + min(parameters.ready_timeout_seconds, context.seconds_left())
    endpoint = ensure_serving(host=context.environment.get("serve_host", DEFAULT_HOST), port=parameters.port)
    context.reporter.note(f"deploying {settings.name} (model {model.digest[:12]}) at port {endpoint.port}")
    endpoint = deploy(settings, endpoint=endpoint, resources=resources)
    wait_until_running(
        settings.name,
        timeout_seconds=deadline - time.monotonic(),
        on_progress=lambda text: context.reporter.progress(time.monotonic() - started, total=None, unit="s", note=text),
    )
    health = wait_for_version(
        endpoint.url, deployment_id=settings.deployment_id, timeout_seconds=deadline - time.monotonic()
    )
    ready_seconds = time.monotonic() - started
    context.reporter.note(f"ready after {ready_seconds:.1f} s on {health['device']} in {health['dtype']}")
    answer = smoke(
        endpoint.url,
        endpoint=str(health["endpoint"]),
        model=settings.name,
        prompt=parameters.smoke_prompt,
        timeout_seconds=max(1.0, deadline - time.monotonic()),
    )
    context.reporter.note(f"smoke request answered in {answer.seconds:.2f} s: {answer.shown!r}")
    _write(context, settings, endpoint=endpoint, model=model)
    return StageResult(
        metrics={
            "ready_seconds": ready_seconds,
            "smoke_seconds": answer.seconds,
            f"smoke_{answer.unit}": float(answer.count),
        },
        facts=_facts(settings, endpoint=endpoint, health=health, answer=answer),
    )


def _settings(context: StageContext[DeployServeParameters], model: InputArtifact) -> ReplicaSettings:
    parameters = context.parameters
    decoder = _decoder(model)
    context_tokens = parameters.max_context_tokens
    if decoder is None:
        _refuse_too_large(context, model)
    else:
        context_tokens = context_tokens or decoder.longest_context
        if context_tokens > decoder.longest_context:
            raise ParameterError(
                f"max_context_tokens is {context_tokens}, but the model can be served with {decoder.longest_context} "
                "positions",
                hint=f"use at most {decoder.longest_context}, or leave it out",
            )
        _refuse_impossible(context, decoder, context_tokens=context_tokens)
    state = context.environment.get("state_directory")
    return ReplicaSettings(
        name=parameters.name,
        model_path=str(model.path),
        digest=model.digest,
        version=_version(context, model),
        deployment_id=uuid.uuid4().hex,
        slots=parameters.slots,
        context=context_tokens,
        prefill_chunk_tokens=parameters.prefill_chunk_tokens,
        decode_steps=parameters.decode_steps,
        prefix_cache_tokens=parameters.prefix_cache_tokens,
        deterministic=parameters.deterministic,
        device=_device(parameters.device, gpus=context.resources.gpus or 0.0),
        dtype=parameters.dtype,
        max_batch_rows=parameters.max_batch_rows,
        batch_wait_seconds=parameters.batch_wait_seconds,
        api_key_digests=_key_digests(context),
        requests_per_minute=parameters.requests_per_minute,
        tokens_per_minute=parameters.tokens_per_minute,
        max_request_bytes=parameters.max_request_bytes,
        dimensions=parameters.dimensions,
        compilation_cache=None if state is None else str(Path(state).resolve() / "jax-cache"),
    )


def _key_digests(context: StageContext[DeployServeParameters]) -> tuple[str, ...]:
    """Of the keys that the flow points to; relative paths start from the project."""
    if context.parameters.api_keys is None:
        return ()
    return read_key_digests(context.parameters.api_keys, environment=os.environ, directory=context.project_root)


def _decoder(model: InputArtifact) -> DecoderConfig | None:
    """The config of a decoder of a family; None where the model is something else, which its replica knows.

    Raises:
        ArtifactError: the directory describes no model.
    """
    if (model.path / PROGRAM_FILE).is_file():
        return None
    config = read_config(model.path)
    return read_decoder(config) if config.get("model_type") in READERS else None


def _refuse_too_large(context: StageContext[DeployServeParameters], model: InputArtifact) -> None:
    """On a CPU, by the size of the stored parameters."""
    if context.resources.gpus:
        return
    stored = sum(path.stat().st_size for path in (model.path / "params").rglob("*") if path.is_file())
    available = psutil.virtual_memory().available
    reason = why_weights_too_big(stored, available=available, replicas=context.parameters.replicas)
    if reason is not None:
        raise ParameterError(reason, hint="lower replicas, or use a larger machine")


def _device(device: str, *, gpus: float) -> str:
    if device == "cuda" and gpus <= 0:
        raise ParameterError(
            "device: cuda was asked for, but the stage asks the cluster for no GPU",
            hint="add `resources: {gpus: 1}` (or a fraction) to the stage, or use device: auto",
        )
    return "cpu" if device == "auto" and gpus <= 0 else device


def _refuse_impossible(
    context: StageContext[DeployServeParameters], config: DecoderConfig, *, context_tokens: int
) -> None:
    """On a CPU, where memory can be seen from here; a GPU replica judges its own device."""
    if context.resources.gpus:
        return
    parameters = context.parameters
    dtype = "float32" if parameters.dtype == "auto" else parameters.dtype
    need = memory_need(config, dtype=dtype, slots=parameters.slots, context=context_tokens, device="cpu")
    reason = why_too_big(
        need,
        available=psutil.virtual_memory().available,
        replicas=parameters.replicas,
        slots=parameters.slots,
        context=context_tokens,
    )
    if reason is not None:
        raise ParameterError(reason, hint="lower slots, max_context_tokens or replicas, or use a larger machine")


def _version(context: StageContext[DeployServeParameters], model: InputArtifact) -> str:
    registration = context.inputs.get("registration")
    if registration is None:
        return model.digest[:12]
    path = registration.path / "registration.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: cannot be read as a registration: {error}") from error


def _write(
    context: StageContext[DeployServeParameters], settings: ReplicaSettings, *, endpoint: Endpoint, model: InputArtifact
) -> None:
    deployment = {
        "name": settings.name,
        "url": f"{endpoint.url}/v1",
        "model_fingerprint": model.fingerprint,
        "model_digest": model.digest,
        "version": settings.version,
        "port": endpoint.port,
        "started_at": time.time(),
    }
    path = context.output("deployment") / "deployment.json"
    path.write_text(json.dumps(deployment, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _facts(
    settings: ReplicaSettings, *, endpoint: Endpoint, health: Mapping[str, Any], answer: SmokeResult
) -> dict[str, Any]:
    said = {name: health[name] for name in _SAID if name in health}
    return {
        "name": settings.name,
        "url": f"{endpoint.url}/v1",
        "health_url": f"{endpoint.url}/health",
        "curl": answer.curl,
        "model_digest": settings.digest,
        "version": settings.version,
        **said,
        "smoke_text": answer.shown,
    }
