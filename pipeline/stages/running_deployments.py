"""What an operator asks of deployments that run, and of them alone.

Owns the view by deployment of what Ray Serve keeps by application, and a roll-out with the settings that serve. Loads
no jax. The one decision: whatever is not the version itself stays as it is.
"""

import http.client
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.cluster.endpoint import TIMEOUT_SECONDS
from pipeline.errors import UsageError, nearest_name
from pipeline.serving.replica_settings import ReplicaSettings
from pipeline.serving.rollout.ray_rollout import RollOut, RunningApplication, application_of, running_applications
from pipeline.serving.rollout.ray_serve import CHALLENGER_SUFFIX, Endpoint, listening
from pipeline.serving.rollout.smoke import SmokeResult
from pipeline.stages.deployment import Watch, bring, process_settings
from pipeline.stages.parameters import DeployServeParameters

PROMPT = str(DeployServeParameters.model_fields["smoke_prompt"].default)


@dataclass(frozen=True, kw_only=True, slots=True)
class BroughtAgain:
    """A version that answered."""

    application: str
    endpoint: Endpoint
    roll_out: RollOut
    answer: SmokeResult


def deployment_rows() -> list[dict[str, Any]]:
    """One row for each deployment that is known to Ray Serve, asked for its health now."""
    at = listening()
    rows = []
    for application in running_applications().values():
        health = {} if at is None else _health(replace(at, route_prefix=application.route_prefix).url)
        for settings in application.config.models:
            url = "" if at is None else f"{replace(at, route_prefix=application.route_prefix).url}/v1"
            rows.append(
                {
                    "name": _shown_name(application, settings),
                    "application": application.name,
                    "version": settings.version,
                    "digest": settings.digest,
                    "since": min((replica.started_at for replica in application.replicas), default=0.0),
                    "running": application.num_running,
                    "replicas": _num_wanted(application),
                    "endpoint": url,
                    "health": _health_text(application, health, settings),
                    "traffic": _traffic_text(application),
                }
            )
    return rows


def current(name: str) -> ReplicaSettings:
    """The settings of the deployment `name`.

    Raises:
        UsageError: it does not run; names those that do.
    """
    return _settings(_application(name), name)


def challenger(name: str) -> ReplicaSettings:
    """The settings of the version that stands beside the one that serves.

    Raises:
        UsageError: there is none.
    """
    found = running_applications().get(f"{_application(name).name}{CHALLENGER_SUFFIX}")
    settings = None if found is None else found.config.model(name)
    if settings is None:
        raise UsageError(
            f"deployment {name!r} has no challenger",
            hint="a challenger stands beside it while a flow with `canary` or `shadow` tries it",
        )
    return settings


def bring_again(settings: ReplicaSettings, *, deadline: float, note: Callable[[str], None]) -> BroughtAgain:
    """Serve this version in the application of the deployment, whose processes stay what they are.

    Raises:
        UsageError: the deployment does not run.
        PipelineError: the version cannot be had; what served before serves.
    """
    application = _application(settings.name)
    process, at = application.config.process, listening()
    assert process is not None and at is not None  # an application of ours runs
    same = process_settings(
        cpus=process.cpus,
        gpus=process.gpus,
        replicas=process.replicas,
        drain_seconds=process.drain_seconds,
        isolation=process.isolation,
        environment=process.environment,
        autoscaling=process.autoscaling,
    )
    watch = Watch(deadline=deadline, on_progress=note, note=note)
    brought = bring(settings, application=application.name, process=same, at=at, prompt=PROMPT, watch=watch)
    return BroughtAgain(
        application=application.name, endpoint=brought.endpoint, roll_out=brought.roll_out, answer=brought.answer
    )


def _application(name: str) -> RunningApplication:
    running = {one: found for one, found in running_applications().items() if not one.endswith(CHALLENGER_SUFFIX)}
    found = application_of(name, running)
    if found is None:
        known = [settings.name for one in running.values() for settings in one.config.models]
        near = nearest_name(name, known)
        raise UsageError(
            f"no deployment {name!r} runs" + (f"; did you mean {near!r}?" if near else ""),
            hint=f"running: {', '.join(known) or 'none'}",
        )
    return found


def _settings(application: RunningApplication, name: str) -> ReplicaSettings:
    settings = application.config.model(name)
    assert settings is not None
    return settings


def _shown_name(application: RunningApplication, settings: ReplicaSettings) -> str:
    return f"{settings.name}{CHALLENGER_SUFFIX}" if application.name.endswith(CHALLENGER_SUFFIX) else settings.name


def _num_wanted(application: RunningApplication) -> int:
    process = application.config.process
    return application.num_running if process is None else max(process.replicas, application.num_running)


def _health(url: str) -> dict[str, Any]:
    """What `/health` says; empty where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_SECONDS) as answer:
            body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return dict(body.get("models", {})) if isinstance(body, dict) else {}


def _health_text(application: RunningApplication, health: dict[str, Any], settings: ReplicaSettings) -> str:
    if not application.num_running:
        return application.status.lower()
    said = health.get(settings.name)
    if said is None:
        return "no answer"
    if said.get("failure"):
        return str(said["failure"])
    return "ok" if said.get("digest") == settings.digest else f"serves {str(said.get('digest'))[:12]}"


def _traffic_text(application: RunningApplication) -> str:
    traffic = application.config.traffic
    if not traffic:
        return "100 %" if not application.name.endswith(CHALLENGER_SUFFIX) else "by its champion"
    percent = float(traffic.get("percent", 0.0))
    if traffic.get("mode") == "shadow":
        return f"100 %, copies of {percent:g} % to its challenger"
    return f"{100 - percent:g} %, {percent:g} % to its challenger"
