"""One model of a replica's process, over its versions.

Owns which parameters it runs and which it ran before. Knows nothing of Ray or HTTP. The one decision: a version is its
parameters; where nothing else changed they are exchanged inside the running engine, and those that ran before stay in
host memory, so that the way back reads nothing and compiles nothing.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pipeline.cluster.ledger import gib
from pipeline.errors import ParameterError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY
from pipeline.serving.accelerator.device import Placement, allocator_room
from pipeline.serving.accelerator.host_memory import available_bytes
from pipeline.serving.accelerator.memory import why_weights_too_big
from pipeline.serving.accelerator.weight_bytes import INT8
from pipeline.serving.hosting.loading_plan import load_as
from pipeline.serving.hosting.served_model import ServedModel
from pipeline.serving.replica_settings import ReplicaSettings, same_executables

_LOG = logging.getLogger(__name__)
_REPORTS = ("conversion.json", "carried.safetensors")
"""Files of a model directory that say where it comes from; serving reads none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Of one version, ready to be given to the executables."""

    settings: ReplicaSettings
    leaves: Any
    """In host memory."""
    seconds: float
    """That reading them took; 0 where they were there."""


class HostedModel:
    """A served model whose parameters can be exchanged."""

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        served: ServedModel,
        facts: dict[str, Any],
        placement: Placement,
        surroundings: str,
    ) -> None:
        """Take over a running engine.

        Args:
            settings: of the version it runs.
            served: the engine and its application.
            facts: what `/health` shows; it changes with the version.
            placement: its dtype is what new parameters are cast to.
            surroundings: `digest_of_surroundings` of the directory.
        """
        self.settings = settings
        self.served = served
        self.facts = facts
        self.surface = served.make_surface(facts)
        self._placement = placement
        self._surroundings = surroundings
        self._previous: Parameters | None = None
        self._lock = threading.Lock()

    @property
    def previous(self) -> ReplicaSettings | None:
        """The version whose parameters are kept in memory."""
        return None if self._previous is None else self._previous.settings

    def why_no_swap(self, settings: ReplicaSettings) -> str | None:
        """Why this version needs an engine of its own, or None where its parameters fit into this one.

        Raises:
            ArtifactError: its directory cannot be read.
        """
        if settings.digest == self.settings.digest and same_executables(self.settings, settings):
            return None  # nothing is exchanged
        if self.served.swap is None:
            return f"an engine that answers {self.served.endpoint} takes no other parameters"
        if not same_executables(self.settings, settings):
            return "its settings differ"
        kept = self._previous
        if kept is not None and kept.settings.digest == settings.digest:
            return None
        if digest_of_surroundings(Path(settings.model_path)) != self._surroundings:
            return "its description or tokenizer differs"
        room = allocator_room(jax.local_devices()[0])
        needed = int(self.facts.get("weight_bytes", 0))
        if room is not None and room < needed:
            return f"the device has {gib(room)} left, and its parameters take {gib(needed)} beside those that serve"
        return None

    def load(self, settings: ReplicaSettings) -> Parameters:
        """The parameters of a version for which `why_no_swap` is None, from memory or from its directory.

        Raises:
            ArtifactError: the directory is damaged, or does not hold what the model needs.
            ParameterError: there is no memory for them.
        """
        with self._lock:
            kept = self._previous
        if kept is not None and kept.settings.digest == settings.digest:
            return Parameters(settings=settings, leaves=kept.leaves, seconds=0.0)
        assert self.served.leaves_of is not None
        started = time.monotonic()
        directory = Path(settings.model_path)
        check_memory(directory, num_bytes=self.facts.get("weight_bytes") if self._placement.dtype == INT8 else None)
        # In host memory, whatever the device: the old ones lie on it until the moment of the exchange.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            leaves = self.served.leaves_of(load_as(self._placement, directory))
        return Parameters(settings=settings, leaves=leaves, seconds=time.monotonic() - started)

    def swap(self, parameters: Parameters) -> float:
        """Run another version from now on; returns seconds. What ran before stays in host memory.

        Raises:
            ParameterError: a leaf has another shape or dtype.
            EngineUnavailable: the engine has failed.
        """
        assert self.served.swap is not None
        started = time.monotonic()
        with self._lock:
            before = self.settings
            old = self.served.swap(parameters.leaves, parameters.settings.version_label)
            self._previous = Parameters(settings=before, leaves=old, seconds=0.0)
            self.relabel(parameters.settings)
        seconds = time.monotonic() - started
        self.facts |= {"swap_seconds": round(seconds, 3), "previous_version": before.version}
        _LOG.info(
            "%s: version %s took over from %s in %.3f s", before.name, self.settings.version, before.version, seconds
        )
        return seconds

    def relabel(self, settings: ReplicaSettings) -> None:
        """Go by the name of another deployment of the same parameters, and let in whom it lets in."""
        self.settings = settings
        self.served.engine.version = settings.version_label
        self.facts |= identity_facts(settings)
        self.surface.access.apply(settings)

    def stop(self, *, drain_seconds: float) -> None:
        """Finish what runs, then end the engine and what serves beside it."""
        self.served.engine.stop(drain_seconds=drain_seconds)
        self.served.close()


def identity_facts(settings: ReplicaSettings) -> Mapping[str, Any]:
    """Which version it is."""
    return {
        "name": settings.name,
        "digest": settings.digest,
        "version": settings.version,
        "deployment_id": settings.deployment_id,
        "system_fingerprint": settings.version_label,
    }


def check_memory(directory: Path, *, num_hosts: int = 1, num_bytes: int | None = None) -> None:
    """Hold the parameters, of which this process reads one part of `num_hosts`, against what is free now.

    `num_bytes` is what they take once they are loaded, where that is less than what is stored: they are quantized leaf
    by leaf.

    Raises:
        ParameterError: they do not fit beside what runs; with the arithmetic.
    """
    stored = sum(path.stat().st_size for path in (directory / PARAMETERS_DIRECTORY).rglob("*") if path.is_file())
    taken = stored if num_bytes is None else min(stored, num_bytes)
    reason = why_weights_too_big(taken // num_hosts, available=available_bytes(), replicas=1)
    if reason is not None:
        raise ParameterError(f"{directory}: {reason}", hint="the version that serves goes on serving")


def digest_of_surroundings(directory: Path) -> str:
    """sha256 over everything in a model directory that serving reads beside the parameters."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in _REPORTS and not name.startswith(f"{PARAMETERS_DIRECTORY}/"):
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
