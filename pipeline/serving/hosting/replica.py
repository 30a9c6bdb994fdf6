"""The models of one process behind one ASGI application, brought to what a configuration lists.

Owns the order of loading, and which way of serving a model takes. Knows nothing of Ray. The one decision: everything
that can fail (reading, checking, compiling) is done before anything that serves is touched, so a configuration that
cannot be had leaves the process as it was and says why.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from pipeline.errors import ParameterError, PipelineError, StageError
from pipeline.models.decoders.model import Decoder
from pipeline.models.description import ModelKind
from pipeline.serving.accelerator.compilation_cache import started_with_cache
from pipeline.serving.accelerator.device_start import started_on
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.accelerator.multi_host import Leader, decided
from pipeline.serving.accelerator.replica_environment import NO_SHARE, ProcessShare
from pipeline.serving.accelerator.weight_bytes import INT8
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.hosting.completion_replica import serve_completions
from pipeline.serving.hosting.embedding_replica import serve_embeddings
from pipeline.serving.hosting.hosted_model import (
    HostedModel,
    Parameters,
    check_memory,
    digest_of_surroundings,
    identity_facts,
)
from pipeline.serving.hosting.loading_plan import plan_loading
from pipeline.serving.hosting.predict_replica import serve_predictions
from pipeline.serving.hosting.served_model import LoadedModel, ServedModel
from pipeline.serving.http.http_routes import make_application
from pipeline.serving.http.model_registry import ModelRegistry
from pipeline.serving.replica_settings import ReplicaConfig, ReplicaSettings, executables_of, read_config
from pipeline.serving.traffic.traffic_settings import read_traffic

_LOG = logging.getLogger(__name__)
_PREDICTING = (ModelKind.PREDICTOR, ModelKind.IMAGE)
LATECOMER_SECONDS = 1.0
"""A request that found the old engine may still be reading its body; so long the engine takes new ones."""


@dataclass(kw_only=True)
class _Prepared:
    """What a configuration needs that is not there yet, by name of the model."""

    parameters: dict[str, Parameters] = field(default_factory=dict)
    """To be exchanged inside a running engine."""
    hosted: dict[str, HostedModel] = field(default_factory=dict)
    """Engines of their own, warm."""


class Replica:
    """The models of a process; `app` answers."""

    def __init__(self, share: ProcessShare = NO_SHARE, *, leader: Leader | None = None) -> None:
        """`share` is what the process was given of its device, `leader` leads other hosts where there are some."""
        self._share = share
        self._leader = leader
        self._registry = ModelRegistry(on_shutdown=self.stop)
        self.app = make_application(self._registry)
        self._config: ReplicaConfig | None = None
        self._models: dict[str, HostedModel] = {}
        self._prepared = _Prepared()
        self._refused: str | None = None
        self._lock = threading.Lock()
        self._draining: list[threading.Thread] = []

    @classmethod
    def of(cls, settings: ReplicaSettings) -> "Replica":
        """A process with one model.

        Raises:
            PipelineError: as `reconfigure`.
        """
        made = cls()
        made.reconfigure(ReplicaConfig(models=(settings,)).as_json())
        return made

    @property
    def models(self) -> Mapping[str, HostedModel]:
        """What is served, by name."""
        return self._models

    @property
    def only(self) -> HostedModel:
        """The model of a process that has one."""
        (hosted,) = self._models.values()
        return hosted

    def prepare(self, given: Mapping[str, Any], *, beside: bool = True) -> dict[str, str]:
        """Read, check and compile what a configuration needs, and change nothing that serves.

        Args:
            given: the configuration.
            beside: an engine of another shape may start beside the one that serves.

        Returns:
            By model: `same`, `swap`, `beside`; or, where `beside` is False, `restart: ` and the reason.

        Raises:
            PipelineError: it cannot be had; what was prepared is dropped. A `StageError` where warm-up failed.
        """
        config = read_config(given)
        with self._lock:
            try:
                return {settings.name: self._prepare(settings, beside=beside) for settings in config.models}
            except EngineUnavailable as error:
                self._discard()
                raise StageError(f"the new version does not start: {error}") from error
            except PipelineError:
                self._discard()
                raise

    def discard(self) -> None:
        """Forget what was prepared."""
        with self._lock:
            self._discard()

    def reconfigure(self, given: Mapping[str, Any]) -> None:
        """Become what a configuration lists.

        A process that serves already and cannot have it goes on as it is; `describe` says why.

        Raises:
            ArtifactError: a model directory is damaged, or its tokenizer does not fit the vocabulary.
            ParameterError: the device does not exist, the model is of a kind that is not served, or a setting does not
                fit it.
            EngineUnavailable: warm-up failed.
        """
        with self._lock:
            try:
                config = read_config(given)
                read_traffic(config.traffic)
                for settings in config.models:
                    self._prepare(settings, beside=True)
                self._become(config)
            except (PipelineError, EngineUnavailable) as error:
                self._discard()
                if not self._models:
                    raise
                self._refused = str(error)
                _LOG.exception("a configuration was refused; what served before goes on")
                return

    def describe(self) -> dict[str, Any]:
        """What serves now, and why the last configuration does not, where it does not."""
        return {
            "models": {name: dict(hosted.facts) for name, hosted in self._models.items()},
            "traffic": {} if self._config is None else dict(self._config.traffic),
            "refused": self._refused,
        }

    def judged_traffic(self) -> dict[str, Any]:
        """What the arms of a trial did so far; asking keeps the trial alive."""
        return self._registry.traffic.judged()

    def check_health(self) -> None:
        """Raise where an engine has failed or stalls; Ray Serve then replaces the replica."""
        failures = [
            f"{name}: {failure}"
            for name, hosted in self._models.items()
            if (failure := hosted.served.engine.status().failure) is not None
        ]
        if failures:
            raise RuntimeError("; ".join(failures))

    def stop(self) -> None:
        """Take nothing new, finish what runs, end every engine."""
        seconds = self._registry.drain_seconds
        stopping = [
            threading.Thread(target=hosted.stop, kwargs={"drain_seconds": seconds}, daemon=True)
            for hosted in self._models.values()
        ]
        for thread in stopping:
            thread.start()
        for thread in (*stopping, *self._draining):
            thread.join()

    def _prepare(self, settings: ReplicaSettings, *, beside: bool) -> str:
        """As `prepare`, for one model; doing it again costs nothing."""
        name, current, ready = settings.name, self._models.get(settings.name), self._prepared
        if current is not None and current.settings == settings:
            return "same"
        reason = "it is not served yet" if current is None else current.why_no_swap(settings)
        if current is not None and reason is None:
            if settings.digest == current.settings.digest:
                return "same"
            if name not in ready.parameters or ready.parameters[name].settings != settings:
                ready.parameters[name] = current.load(settings)
            return "swap"
        if not beside:
            return f"restart: {reason}"
        if name not in ready.hosted or ready.hosted[name].settings != settings:
            with started_on(self._share, who=name, is_first=not (self._models or ready.hosted)):
                ready.hosted[name] = host(settings, leader=self._leader)
            ready.hosted[name].facts |= self._share.facts
        return "beside"

    def _become(self, config: ReplicaConfig) -> None:
        """Nothing in here reads a file or compiles."""
        ready = self._prepared  # until the end: where an exchange fails, what was prepared is ended
        models: dict[str, HostedModel] = {}
        for settings in config.models:
            current = self._models.get(settings.name)
            if settings.name in ready.hosted:
                models[settings.name] = ready.hosted[settings.name]
                continue
            assert current is not None
            if settings.name in ready.parameters and settings.digest != current.settings.digest:
                current.swap(ready.parameters[settings.name])
            current.relabel(settings)
            models[settings.name] = current
        self._prepared = _Prepared()
        before, self._models, self._config, self._refused = self._models, models, config, None
        if config.process is not None:
            self._registry.drain_seconds = config.process.drain_seconds
        self._registry.show(hosted.surface for hosted in models.values())
        self._registry.traffic.configure(config.traffic)
        for name, hosted in before.items():
            if models.get(name) is not hosted:
                self._retire(hosted)
        for name, hosted in ready.hosted.items():
            if models.get(name) is not hosted:
                self._retire(hosted)

    def _retire(self, hosted: HostedModel) -> None:
        """Let its requests end; new ones go to what took its place."""

        def end() -> None:
            time.sleep(LATECOMER_SECONDS)
            hosted.stop(drain_seconds=self._registry.drain_seconds)

        thread = threading.Thread(target=end, name="drain", daemon=True)
        thread.start()
        self._draining = [*(one for one in self._draining if one.is_alive()), thread]

    def _discard(self) -> None:
        ready, self._prepared = self._prepared, _Prepared()
        for hosted in ready.hosted.values():
            self._retire(hosted)


def host(settings: ReplicaSettings, *, leader: Leader | None = None) -> HostedModel:
    """Load, check, compile and start one model.

    Raises:
        ArtifactError: the model directory is damaged, or its tokenizer does not fit the vocabulary.
        ParameterError: the device does not exist, the model is of a kind that is not served, does not fit or would be
            too slow, or a setting does not fit it.
        EngineUnavailable: warm-up failed.
    """
    started = time.monotonic()
    plan = plan_loading(settings)
    if leader is not None:
        leader.serve(decided(plan.settings, dtype=plan.placement.dtype))
    directory = Path(settings.model_path)
    is_int8 = plan.placement.dtype == INT8
    check_memory(
        directory, num_hosts=settings.mesh_hosts, num_bytes=plan.facts.get("weight_bytes") if is_int8 else None
    )
    # Over several hosts XLA divides its trials of kernels between processes that compile alike; one that finds its
    # executables in a cache would leave the others waiting.
    directory_of_cache = settings.compilation_cache if leader is None else None
    with started_with_cache(directory_of_cache, device=plan.device) as cache:
        meshes = ServingMesh.groups(plan.settings.mesh, device=plan.device)

        def load(mesh: ServingMesh) -> nnx.Module:
            with jax.default_device(mesh.own_device):
                return plan.load(directory, layout=mesh.layout(plan.description))

        served = serve(
            LoadedModel(
                settings=plan.settings,
                directory=directory,
                description=plan.description,
                module=load(meshes[0]),
                device=plan.device,
                placement=plan.placement,
                meshes=meshes,
                load=load,
                leader=leader,
            )
        )
        cached = {} if cache is None else cache.facts(what=repr(executables_of(settings)))
    facts = {
        **identity_facts(settings),
        "endpoint": served.endpoint,
        **plan.facts,
        **served.facts,
        **cached,
        "start_seconds": round(time.monotonic() - started, 3),
    }
    return HostedModel(
        settings,
        served=served,
        facts=facts,
        placement=plan.placement,
        surroundings=digest_of_surroundings(directory),
    )


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
