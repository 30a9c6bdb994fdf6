"""Deployments on Ray Serve.

Owns the replica's actor, deploying, waiting, deleting. Loads no jax: only the replica's process does, after its
environment is set. The one decision: an actor is made without arguments and told everything by its configuration, so
one call deploys, changes and replaces.
"""

import asyncio
import functools
import importlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, LoggingConfig

from pipeline import errors
from pipeline.cluster.ray_lock import cluster_lock
from pipeline.errors import ClusterError, ParameterError, PipelineError, StageError
from pipeline.serving.accelerator.replica_environment import NUM_HOSTS, settle
from pipeline.serving.replica_settings import ReplicaConfig
from pipeline.serving.rollout.ray_hosts import led_hosts, spread_options

REPLICA = "pipeline.serving.hosting.replica:Replica"
"""By name: importing it loads jax, which only the replica's own process may, with its memory fraction set."""
PORTS = range(8000, 8200)
"""Where a port is looked for when the flow names none."""
DEPLOYMENT = "engine"
"""Of each application."""
CHALLENGER_SUFFIX = "-challenger"
"""Of an application that stands beside the one that serves the same model; it never gets the route `/`."""
MAX_ONGOING_REQUESTS = 1024
START_SECONDS = 120.0
POLL_SECONDS = 0.2
_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Unavailable|Interrupt))(?:: (.*))?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a deployment answers."""

    host: str
    port: int
    route_prefix: str

    @property
    def url(self) -> str:
        """Without `/v1`."""
        return f"http://{self.host}:{self.port}{self.route_prefix.rstrip('/')}"


class ServedReplica:
    """The actor: jitted JAX models that are their own HTTP server; all it is told comes through `reconfigure`."""

    def __init__(self) -> None:
        self._share = settle()  # before the import below loads jax
        self._hosts = led_hosts()
        module, _, name = REPLICA.partition(":")
        leader = None if self._hosts is None else self._hosts.leader
        self._replica = getattr(importlib.import_module(module), name)(self._share, leader=leader)

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application; Ray Serve asks for it after the constructor."""
        return self._replica.app

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Ray Serve's call with the `user_config`: after the constructor, and whenever it changes."""
        await asyncio.to_thread(self._replica.reconfigure, config)

    async def prepare(self, config: dict[str, Any], beside: bool) -> dict[str, Any]:
        """`Replica.prepare`; an error is part of the answer, because a broadcast would lose its class."""
        try:
            how = await asyncio.to_thread(functools.partial(self._replica.prepare, config, beside=beside))
        except PipelineError as error:
            return {"error": [type(error).__name__, error.message, error.hint]}
        return {"how": how}

    async def discard(self) -> None:
        """`Replica.discard`."""
        await asyncio.to_thread(self._replica.discard)

    async def describe(self) -> dict[str, Any]:
        """`Replica.describe`."""
        share = {"share": self._share.share, "memory": self._share.memory_reason, "warnings": self._share.warnings}
        return {**self._replica.describe(), **share}

    async def judged_traffic(self) -> dict[str, Any]:
        """`Replica.judged_traffic`."""
        report: dict[str, Any] = self._replica.judged_traffic()
        return report

    def check_health(self) -> None:
        """Asked by Ray Serve every few seconds."""
        self._replica.check_health()


def ensure_serving(*, host: str, port: int | None) -> Endpoint:
    """Start Ray Serve where it does not run; its HTTP address is then fixed until the cluster goes.

    Raises:
        ParameterError: Serve runs at another port than the one asked for, or that port is taken.
        ClusterError: Serve's proxy did not come up.
    """
    # Two stages may find it missing at once; the second must find it running.
    with cluster_lock("Ray Serve", timeout_seconds=START_SECONDS, on_wait=lambda _: None):
        running = listening()
        return _start_serve(host=host, port=port) if running is None else _checked(running, port=port)


def _checked(running: Endpoint, *, port: int | None) -> Endpoint:
    if port is not None and port != running.port:
        raise ParameterError(
            f"port: {port} was asked for, but Ray Serve of this cluster already listens on {running.port}",
            hint="leave `port` out, or stop the cluster first (`pipeline down`)",
        )
    return running


def _start_serve(*, host: str, port: int | None) -> Endpoint:
    if port is not None and not _is_free(host, port):
        raise ParameterError(f"port: {port} is taken on this machine", hint="leave `port` out to get a free one")
    chosen = port if port is not None else next((p for p in PORTS if _is_free(host, p)), None)
    if chosen is None:
        raise ClusterError(f"no free TCP port between {PORTS.start} and {PORTS.stop - 1} on this machine")
    try:
        serve.start(http_options=HTTPOptions(host=host, port=chosen))
    except RuntimeError as error:
        # Another server may have taken the port since it was looked at. Serve keeps its first address for good, so it
        # goes, and the next attempt chooses anew.
        serve.shutdown()
        raise ClusterError(f"Ray Serve could not listen on {host}:{chosen}: {_last_lines(error)}") from error
    return Endpoint(host=_reachable(host), port=chosen, route_prefix="/")


def listening() -> Endpoint | None:
    """Where Ray Serve of the connected cluster listens; None where it does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    running = client.http_config
    return Endpoint(host=_reachable(running.host), port=running.port, route_prefix="/")


def _last_lines(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[-4:])


def deploy(application: str, config: ReplicaConfig) -> str:
    """Ask Ray Serve for an application and return its route prefix at once; `wait_until_running` waits.

    An application of that name keeps its route. Where its process is the same, its actors are only told the new
    configuration; where it is not, new ones start beside the old ones and take over when they are ready. A new
    application gets `/` where that is free, else `/<name>`.
    """
    process = config.process
    assert process is not None
    options: dict[str, Any] = {
        "num_cpus": process.cpus,
        "runtime_env": {"env_vars": dict(process.environment)},
    }
    if process.gpus:
        options["num_gpus"] = process.gpus
    num_hosts = int(process.environment.get(NUM_HOSTS, "1"))
    spread = {} if num_hosts == 1 else spread_options(num_hosts=num_hosts, cpus=process.cpus, gpus=process.gpus)
    deployment = serve.deployment(
        serve.ingress()(ServedReplica),
        name=DEPLOYMENT,
        **(
            {"num_replicas": process.replicas}
            if process.autoscaling is None
            else {"autoscaling_config": AutoscalingConfig(**_scaling(application, process.autoscaling))}
        ),
        ray_actor_options=options,
        **spread,
        user_config=config.as_json(),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=process.drain_seconds,
        health_check_period_s=5.0,
        max_constructor_retry_count=1,  # a model that cannot be loaded will not load the second time
        max_surge_percent=100,  # replacements start before old replicas stop
        logging_config=LoggingConfig(enable_access_log=False),
    )
    # Left to itself, Ray Serve takes each call for new code and replaces every actor.
    deployment = deployment.options(version=process.identity, _internal=True)
    prefix = _route_prefix(application)
    serve.run_many(
        [serve.RunTarget(target=deployment.bind(), name=application, route_prefix=prefix)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    return prefix


def wait_until_running(
    name: str,
    *,
    timeout_seconds: float,
    on_progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until every replica of the new version runs.

    Raises:
        PipelineError: the replica failed; its own error first, in its own class.
        ClusterError: it is not ready in time.
    """
    deadline = clock() + timeout_seconds
    said = ""
    while True:
        found = serve.status().applications.get(name)
        if found is not None:
            if found.status == ApplicationStatus.RUNNING:
                return
            if found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise replica_error(name, _messages(found))
            now_says = _progress(found)
            if now_says != said:
                on_progress(now_says)
                said = now_says
        if clock() > deadline:
            raise ClusterError(
                f"deployment {name!r} is not ready after {timeout_seconds:g} s; {said or 'Ray Serve says nothing'}",
                hint="raise ready_timeout_seconds, or ask for less (resources, slots); the replica's log is in Ray's "
                "log directory under serve/",
            )
        time.sleep(POLL_SECONDS)


def delete(name: str) -> None:
    """Take a deployment down after its requests have finished; harmless where there is none."""
    if name in serve.status().applications:
        serve.delete(name)


def replica_error(name: str, text: str) -> PipelineError:
    """The replica's own error out of Ray Serve's account of it, in its own class where it is one of ours."""
    kind, message = own_error(text)
    named = getattr(errors, kind, None)
    failure = named if isinstance(named, type) and issubclass(named, PipelineError) else StageError
    shown = message if failure is not StageError else f"{kind}: {message}".strip(": ")
    return failure(
        f"{shown}\n  (a replica of deployment {name!r} failed to start)",
        hint="a version that was serving before still serves; this one was not taken",
    )


def own_error(text: str) -> tuple[str, str]:
    """(class name, message) of the last exception in a traceback text; ("", text) where there is none."""
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        match = _ERROR_LINE.match(lines[index].strip())
        if match is not None:
            rest = [line for line in lines[index + 1 :] if line.strip()]
            return match[1], "\n".join([match[2] or "", *rest]).strip()
    return "", text.strip()


def serve_applications() -> Mapping[str, Any]:
    """What Ray Serve says of every application, by name; empty where it does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return {} if client is None else client.get_serve_details()["applications"]


def _scaling(application: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Ray Serve goes to `initial_replicas` whenever it is told anything, so it is never fewer than run."""
    deployment = serve_applications().get(application, {}).get("deployments", {}).get(DEPLOYMENT, {})
    states = [str(getattr(one["state"], "value", one["state"])) for one in deployment.get("replicas", ())]
    running = sum(state in ("RUNNING", "UPDATING") for state in states)
    least = given.get("initial_replicas", given["min_replicas"])
    return {**given, "initial_replicas": min(max(least, running), given["max_replicas"])}


def _route_prefix(name: str) -> str:
    prefixes = {app: details["route_prefix"] for app, details in serve_applications().items()}
    if prefixes.get(name):
        return str(prefixes[name])
    return "/" if "/" not in prefixes.values() and not name.endswith(CHALLENGER_SUFFIX) else f"/{name}"


def _is_free(host: str, port: int) -> bool:
    # Without SO_REUSEADDR's companion SO_REUSEPORT, which HAProxy uses: it would share a taken port without an error.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _reachable(host: str | None) -> str:
    return "127.0.0.1" if host in (None, "0.0.0.0", "::") else str(host)


def _messages(found: Any) -> str:
    parts = [deployment.message for deployment in found.deployments.values() if deployment.message]
    return "\n".join(parts) or found.message


def _progress(found: Any) -> str:
    states = [
        f"{count} {str(state).lower()}"
        for deployment in found.deployments.values()
        for state, count in deployment.replica_states.items()
        if count
    ]
    return f"Ray Serve: {found.status.value.lower()}, replicas: {', '.join(states) or 'none yet'}"
