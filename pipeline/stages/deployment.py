"""One model of one application, from settings to a version that answered.

Owns the order that a stage of a flow and a command of an operator have in common: configure, roll out, ask. Loads no
jax; only the replicas do. The one decision: a version is deployed when a client got an answer over HTTP from it, and
what is written down of it is enough to deploy it again.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.cluster.ray_lock import cluster_lock
from pipeline.errors import ParameterError
from pipeline.serving.accelerator.process_identity import process_identity
from pipeline.serving.http.api_keys import digest_of
from pipeline.serving.replica_settings import ProcessSettings, ReplicaConfig, ReplicaSettings
from pipeline.serving.rollout.ray_rollout import RollOut, RunningApplication, roll_out, running_applications
from pipeline.serving.rollout.ray_serve import Endpoint
from pipeline.serving.rollout.ray_traffic import challenger_application
from pipeline.serving.rollout.smoke import SmokeResult, smoke, wait_for_version


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """A version that answered."""

    endpoint: Endpoint
    roll_out: RollOut
    health: Mapping[str, Any]
    answer: SmokeResult
    before: ReplicaSettings | None
    """What served under that name until now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who waits, and for how long."""

    deadline: float
    """By `time.monotonic`."""
    on_progress: Callable[[str], None]
    note: Callable[[str], None]

    @property
    def seconds_left(self) -> float:
        """At least one."""
        return max(1.0, self.deadline - time.monotonic())


def process_settings(
    *,
    cpus: float,
    gpus: float,
    replicas: int,
    drain_seconds: float,
    isolation: str,
    environment: Mapping[str, str],
    autoscaling: Mapping[str, Any] | None = None,
) -> ProcessSettings:
    """The processes of an application that run the code of this one."""
    return ProcessSettings(
        identity=process_identity(cpus=cpus, gpus=gpus, environment=environment),
        isolation=isolation,
        cpus=cpus,
        gpus=gpus,
        replicas=replicas,
        drain_seconds=drain_seconds,
        environment=dict(environment),
        autoscaling=autoscaling,
    )


def bring(
    settings: ReplicaSettings,
    *,
    application: str,
    process: ProcessSettings,
    at: Endpoint,
    prompt: str,
    watch: Watch,
) -> Brought:
    """Serve `settings` in `application` and ask it something; models beside it in the application stay.

    Args:
        settings: of the new version.
        application: of Ray Serve; made where it does not run.
        process: of its actors.
        at: where Ray Serve listens.
        prompt: of the first request, where it takes text.
        watch: deadline and listeners.

    Raises:
        ParameterError: another application serves a model of that name.
        PipelineError: the version cannot be had; what served before serves.
        StageError: it did not answer rightly.
    """
    api_key = secrets.token_urlsafe(32) if settings.api_key_digests else None
    if api_key is not None:
        settings = replace(settings, smoke_key_digest=digest_of(api_key))
    # Two stages of a flow may bring two models to one application at once: each must see what the other made of it.
    with cluster_lock(application, timeout_seconds=watch.seconds_left, on_wait=watch.on_progress):
        running = running_applications()
        if application != challenger_application(settings.name):
            _refuse_second_home(settings.name, application=application, running=running)
        found = running.get(application)
        before = None if found is None else found.config.model(settings.name)
        rolled = roll_out(
            application,
            merged(found, settings, process=process),
            timeout_seconds=watch.seconds_left,
            on_progress=watch.on_progress,
        )
    watch.note(roll_out_text(rolled))
    endpoint = replace(at, route_prefix=rolled.route_prefix)
    health = wait_for_version(
        endpoint.url, model=settings.name, deployment_id=settings.deployment_id, timeout_seconds=watch.seconds_left
    )
    answer = smoke(
        endpoint.url,
        endpoint="chat" if health.get("has_chat_template") else str(health["endpoint"]),
        model=settings.name,
        prompt=prompt,
        timeout_seconds=watch.seconds_left,
        api_key=api_key,
    )
    watch.note(f"smoke request answered in {answer.seconds:.2f} s: {answer.shown!r}")
    return Brought(endpoint=endpoint, roll_out=rolled, health=health, answer=answer, before=before)


def merged(found: RunningApplication | None, settings: ReplicaSettings, *, process: ProcessSettings) -> ReplicaConfig:
    """The application's configuration with this version of this model."""
    others = () if found is None else found.config.models
    models = tuple(settings if one.name == settings.name else one for one in others)
    if settings not in models:
        models = (*models, settings)
    traffic = {} if found is None else found.config.traffic
    # A new version ends a trial against the old one, also one whose judge was killed.
    return ReplicaConfig(
        models=models, process=process, traffic={} if traffic.get("model") == settings.name else traffic
    )


def roll_out_text(rolled: RollOut) -> str:
    """What was done, for a person."""
    took = f"{rolled.seconds - rolled.prepare_seconds:.1f} s"
    read = f"prepared in {rolled.prepare_seconds:.1f} s while the old version served"
    return {
        "started": f"started in {took}",
        "swapped": f"swapped in {took}, nothing compiled ({read})",
        "beside": f"took over in {took} inside its process ({read}): {rolled.reason}",
        "replaced": f"replaced by new processes in {rolled.seconds:.1f} s: {rolled.reason}",
        "unchanged": "the same parameters serve already",
    }[rolled.how]


def _refuse_second_home(name: str, *, application: str, running: Mapping[str, RunningApplication]) -> None:
    other = next(
        (
            one.name
            for one in running.values()
            if one.config.model(name) and one.name not in (application, challenger_application(name))
        ),
        None,
    )
    if other is not None:
        raise ParameterError(
            f"deployment {name!r} runs in the application {other!r}, but is asked for in {application!r}",
            hint="keep its `isolation`, or stop everything first (`pipeline down`)",
        )
