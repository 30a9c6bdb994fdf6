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
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.store import open_store
from pipeline.cluster.isolation import ServingPlan
from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.config_file import read_config
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.partition import MeshSize
from pipeline.models.decoders.readers import READERS, read_decoder
from pipeline.serving.accelerator.cache_budget import SHORTEST_CONTEXT
from pipeline.serving.accelerator.host_memory import available_bytes
from pipeline.serving.accelerator.memory import memory_need, why_too_big, why_weights_too_big
from pipeline.serving.accelerator.mesh_check import check_mesh
from pipeline.serving.accelerator.replica_environment import replica_environment
from pipeline.serving.http.api_keys import read_key_digests
from pipeline.serving.replica_settings import ProcessSettings, ReplicaSettings
from pipeline.serving.rollout.deployment_record import (
    DeploymentEvent,
    VersionReference,
    append_event,
    operator,
    recorded_settings,
)
from pipeline.serving.rollout.ray_serve import Endpoint, ensure_serving
from pipeline.stages.deployment import Brought, Watch, bring, process_settings, roll_out_text
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import InputArtifact, StageContext, StageResult
from pipeline.stages.scaling import autoscaling_of, least_replicas, wake
from pipeline.stages.trial import prove

DEFAULT_HOST = "127.0.0.1"
PROGRAM_FILE = "program.json"
"""Of a traced model."""
_SAID = (
    *("endpoint", "device", "device_reason", "dtype", "dtype_reason", "warm_up_seconds"),
    *("estimated_per_second", "estimate_reason", "slots", "memory_reason", "gpus", "share_reason"),
    *("context_tokens", "dimensions", "pooling", "pooling_reason", "max_batch_rows"),
    *("compile_cache", "compile_cache_usable", "compile_cache_reason", "compile_cache_role"),
    *("executables_compiled", "executables_from_cache"),
)
"""What `/health` says and the stage remembers, where the model has it."""


def run(context: StageContext[DeployServeParameters]) -> StageResult:
    """Deploy the model and leave it serving; writes `deployment/deployment.json`.

    Raises:
        ParameterError: the replicas cannot fit, the context is longer than the model's, or the port is not to be had.
        ArtifactError: the model directory is damaged, or its tokenizer does not fit.
        ClusterError: the replicas are not ready in time.
        StageError: a replica failed, or the smoke request did not bring an answer.
        GateError: a canary or shadow trial was lost; what served before serves.
    """
    parameters, model = context.parameters, context.input("model")
    settings = _settings(context, model)
    started = time.monotonic()
    watch = Watch(
        deadline=started + min(parameters.ready_timeout_seconds, context.seconds_left()),
        on_progress=lambda text: context.reporter.progress(time.monotonic() - started, total=None, unit="s", note=text),
        note=context.reporter.note,
    )
    endpoint = ensure_serving(host=context.environment.get("serve_host", DEFAULT_HOST), port=parameters.port)
    application, process = _process(context, settings)
    watch.note(f"deploying {settings.name} (model {model.digest[:12]}) at port {endpoint.port}")
    wake(application, at=endpoint, watch=watch)
    trial_metrics = prove(context, settings, application=application, process=process, at=endpoint, watch=watch)
    watch = replace(watch, deadline=time.monotonic() + min(parameters.ready_timeout_seconds, context.seconds_left()))
    brought = bring(
        settings,
        application=application,
        process=process,
        at=endpoint,
        prompt=parameters.smoke_prompt,
        watch=watch,
    )
    health, answer = brought.health, brought.answer
    ready_seconds = brought.roll_out.seconds
    watch.note(f"ready after {ready_seconds:.1f} s on {health['device']} in {health['dtype']}")
    if "compile_cache" in health:
        watch.note(f"compile cache: {health['compile_cache']}; {health['compile_cache_reason']}")
    for warning in (*health.get("warnings", ()), *health.get("share_warnings", ())):
        watch.note(f"warning: {warning}")
    event = _event(context, settings, brought=brought, application=application)
    if "store" in context.environment:
        append_event(open_store(context.environment["store"]), event)
    _write(context, settings, endpoint=brought.endpoint, model=model)
    return StageResult(
        metrics={
            "ready_seconds": ready_seconds,
            "smoke_seconds": answer.seconds,
            f"smoke_{answer.unit}": float(answer.count),
            **trial_metrics,
        },
        facts=_facts(settings, brought=brought, event=event),
    )


def _process(context: StageContext[DeployServeParameters], settings: ReplicaSettings) -> tuple[str, ProcessSettings]:
    """The application and its processes; a flow on one GPU may put several deployments into one."""
    parameters, resources = context.parameters, context.resources
    application, isolation, gpus, replicas = settings.name, "process", resources.gpus or 0.0, least_replicas(parameters)
    if "serving_plan" in context.environment:
        shared = ServingPlan.from_text(context.environment["serving_plan"]).process_of(settings.name)
        application, gpus, replicas = shared.application, shared.share, shared.replicas
        isolation = "shared" if shared.is_shared else "process"
        context.reporter.note(f"isolation {isolation}: {shared.reason}")
        if isolation == "shared" and settings.mesh_hosts > 1:
            raise ParameterError(
                f"mesh.hosts is {settings.mesh_hosts}, and a model over several hosts cannot share its process",
                hint="set isolation: process",
            )
    return application, process_settings(
        cpus=resources.cpus,
        gpus=gpus,
        replicas=replicas,
        drain_seconds=parameters.drain_timeout_seconds,
        autoscaling=autoscaling_of(parameters, isolation=isolation),
        isolation=isolation,
        environment=replica_environment(
            device=settings.device,
            gpus=gpus,
            state_directory=context.environment.get("state_directory"),
            cpu_devices=settings.mesh.devices_per_host,
            num_hosts=settings.mesh_hosts,
        ),
    )


def _settings(context: StageContext[DeployServeParameters], model: InputArtifact) -> ReplicaSettings:
    parameters = context.parameters
    decoder = _decoder(model)
    mesh = MeshSize(**parameters.mesh.model_dump())
    check_mesh(
        mesh,
        config=decoder,
        slots=parameters.slots or mesh.data,
        gpus=context.resources.gpus or 0.0,
        dtype=parameters.dtype,
    )
    context_tokens = parameters.max_context_tokens
    if decoder is None:
        _refuse_too_large(context, model)
    else:
        if context_tokens is not None and context_tokens > decoder.longest_context:
            raise ParameterError(
                f"max_context_tokens is {context_tokens}, but the model can be served with {decoder.longest_context} "
                "positions",
                hint=f"use at most {decoder.longest_context}, or leave it out",
            )
        _refuse_impossible(context, decoder)
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
        max_logprobs=parameters.max_logprobs,
        device=_device(parameters.device, gpus=context.resources.gpus or 0.0),
        dtype=parameters.dtype,
        min_tokens_per_second=parameters.min_tokens_per_second,
        memory_part=_memory_part(context),
        mesh_tensor=mesh.tensor,
        mesh_data=mesh.data,
        mesh_hosts=mesh.hosts,
        max_batch_rows=parameters.max_batch_rows,
        batch_wait_seconds=parameters.batch_wait_seconds,
        api_key_digests=key_digests(parameters, project_root=context.project_root),
        requests_per_minute=parameters.requests_per_minute,
        tokens_per_minute=parameters.tokens_per_minute,
        max_request_bytes=parameters.max_request_bytes,
        dimensions=parameters.dimensions,
        compilation_cache=None if state is None else str(Path(state).resolve() / "jax-cache"),
    )


def _memory_part(context: StageContext[DeployServeParameters]) -> float:
    """Of its process's memory, where the process serves several deployments of the flow."""
    text = context.environment.get("serving_plan")
    return 1.0 if text is None else ServingPlan.from_text(text).part_of(context.parameters.name)


def key_digests(parameters: DeployServeParameters, *, project_root: Path) -> tuple[str, ...]:
    """Of the keys that the flow points to; relative paths start from the project.

    Raises:
        ParameterError: there are none, or not where they should be.
    """
    if parameters.api_keys is None:
        return ()
    return read_key_digests(parameters.api_keys, environment=os.environ, directory=project_root)


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
    available = available_bytes()
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


def _refuse_impossible(context: StageContext[DeployServeParameters], config: DecoderConfig) -> None:
    """On a CPU, where memory can be seen from here; a GPU replica judges its own device.

    What the flow leaves open is judged at its least; the replica makes it as large as fits.
    """
    if context.resources.gpus:
        return
    parameters = context.parameters
    dtype = "float32" if parameters.dtype == "auto" else parameters.dtype
    slots = parameters.slots or 1
    context_tokens = parameters.max_context_tokens or min(SHORTEST_CONTEXT, config.longest_context)
    need = memory_need(config, dtype=dtype, slots=slots, context=context_tokens, device="cpu")
    reason = why_too_big(
        need,
        available=available_bytes(),
        replicas=parameters.replicas,
        slots=slots,
        context=context_tokens,
    )
    if reason is not None:
        raise ParameterError(reason, hint="lower slots, max_context_tokens or replicas, or use a larger machine")


def _version(context: StageContext[DeployServeParameters], model: InputArtifact) -> str:
    return str(_registration(context).get("version", model.digest[:12]))


def _registration(context: StageContext[DeployServeParameters]) -> Mapping[str, Any]:
    """What the registering stage wrote; empty where the flow names none."""
    registration = context.inputs.get("registration")
    if registration is None:
        return {}
    path = registration.path / "registration.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"version": found["version"], "name": found.get("name", ""), "tags": found.get("tags", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _event(
    context: StageContext[DeployServeParameters], settings: ReplicaSettings, *, brought: Brought, application: str
) -> DeploymentEvent:
    registration = _registration(context)
    before = brought.before
    tags: Mapping[str, str] = registration.get("tags", {})
    return DeploymentEvent(
        name=settings.name,
        action="deploy",
        when=time.time(),
        who=operator(),
        source=None if before is None else VersionReference(version=before.version, digest=before.digest),
        target=VersionReference(version=settings.version, digest=settings.digest),
        how=brought.roll_out.how,
        seconds=round(brought.roll_out.seconds, 3),
        gates={name.removeprefix("gate."): value for name, value in tags.items() if name.startswith("gate.")},
        reason=f"run {context.run_id} of flow {context.flow}",
        application=application,
        registered_model=str(registration.get("name", "")),
        settings=recorded_settings(settings),
    )


def _facts(settings: ReplicaSettings, *, brought: Brought, event: DeploymentEvent) -> dict[str, Any]:
    health, url = brought.health, brought.endpoint.url
    said = {name: health[name] for name in _SAID if name in health}
    return {
        "name": settings.name,
        "url": f"{url}/v1",
        "health_url": f"{url}/health",
        "curl": brought.answer.curl,
        "model_digest": settings.digest,
        "version": settings.version,
        "rolled_out": roll_out_text(brought.roll_out),
        **said,
        "smoke_text": brought.answer.shown,
        "deployment_event": {name: value for name, value in event.as_json().items() if name != "settings"},
    }
