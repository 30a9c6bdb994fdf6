"""Bringing what runs on Ray Serve to another version.

Owns the order: ask the actors whether they can, tell them, see that they did. Loads no jax. The one decision: the
actors prepare a version while they serve the old one, and only what every one of them has ready is made the
application's configuration; a version that cannot be had leaves application and configuration as they were.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from pipeline import errors
from pipeline.cluster.ledger import Claim
from pipeline.errors import ClusterError, PipelineError, StageError
from pipeline.serving.replica_settings import ReplicaConfig, read_config
from pipeline.serving.rollout.ray_claims import check_room
from pipeline.serving.rollout.ray_serve import DEPLOYMENT, deploy, replica_error, serve_applications, wait_until_running

POLL_SECONDS = 0.05
SETTLE_SECONDS = 30.0
ASK_SECONDS = 30.0
"""For an answer that needs no work."""
How = Literal["started", "swapped", "beside", "replaced", "unchanged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningReplica:
    """One actor."""

    pid: int | None
    state: str
    started_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningApplication:
    """What Ray Serve knows of an application of ours."""

    name: str
    status: str
    message: str
    route_prefix: str
    config: ReplicaConfig
    replicas: tuple[RunningReplica, ...]

    @property
    def num_running(self) -> int:
        """Replicas that answer."""
        return sum(replica.state == "RUNNING" for replica in self.replicas)

    @property
    def claim(self) -> Claim:
        """What its processes hold of GPUs."""
        share = 0.0 if self.config.process is None else self.config.process.gpus
        return Claim(owner=self.name, share=share, processes=len(self.replicas))


@dataclass(frozen=True, kw_only=True, slots=True)
class RollOut:
    """What was done."""

    how: How
    reason: str
    """Why not something quicker."""
    route_prefix: str
    seconds: float
    prepare_seconds: float
    """Of them, while the old version served undisturbed."""


def running_applications() -> dict[str, RunningApplication]:
    """Applications of ours on the connected cluster, by name; none where Ray Serve does not run."""
    return {
        name: _running(name, found)
        for name, found in serve_applications().items()
        if (found["deployments"].get(DEPLOYMENT) or {}).get("deployment_config", {}).get("user_config")
    }


def application_of(model: str, applications: Mapping[str, RunningApplication]) -> RunningApplication | None:
    """The application that serves the model called `model`."""
    return next((found for found in applications.values() if found.config.model(model) is not None), None)


def roll_out(
    application: str,
    config: ReplicaConfig,
    *,
    timeout_seconds: float,
    on_progress: Callable[[str], None],
) -> RollOut:
    """Bring an application to `config`, and wait until every replica has it.

    Raises:
        ParameterError: the GPUs have no room for it beside what serves.
        PipelineError: it cannot be had; in the class and words of the replica that said so. What served before serves.
        ClusterError: the replicas are not ready in time; likewise.
    """
    started = time.monotonic()
    deadline = started + timeout_seconds
    _settle(application, seconds=min(SETTLE_SECONDS, timeout_seconds))
    running = running_applications()
    before = running.get(application)
    how: How = "started"
    reason = "nothing of that name ran"
    if before is not None and before.num_running:
        how, reason, config = _choose(before, config, deadline=deadline, on_progress=on_progress)
    if how in ("started", "replaced") and config.process is not None:
        claims = {name: found.claim for name, found in running.items()}
        check_room(application, config.process, serving=claims, is_replaced=how == "replaced")
    prepared = time.monotonic()
    try:
        prefix = deploy(application, config)
        _wait(application, config, how=how, deadline=deadline, on_progress=on_progress)
    except PipelineError:
        if before is not None and before.num_running:
            deploy(application, before.config)
            _settle(application, before.config, seconds=SETTLE_SECONDS)
            _ask(application, "discard", seconds=ASK_SECONDS)
        raise
    return RollOut(
        how=how,
        reason=reason,
        route_prefix=prefix,
        seconds=time.monotonic() - started,
        prepare_seconds=prepared - started,
    )


def describe(application: str) -> list[dict[str, Any]]:
    """What each running replica says of itself; empty where none runs."""
    return [answer for answer in _ask(application, "describe", seconds=ASK_SECONDS) if isinstance(answer, dict)]


def _choose(
    before: RunningApplication, config: ReplicaConfig, *, deadline: float, on_progress: Callable[[str], None]
) -> tuple[How, str, ReplicaConfig]:
    """How the running application gets there, why so, and the configuration with the identity that makes it so."""
    old, new = before.config.process, config.process
    assert new is not None
    if old is None or _kind(old.identity) != _kind(new.identity):
        return "replaced", "code, environment or resources of the process changed", config
    on_progress("the running replicas prepare the new version")
    kept = replace(config, process=replace(new, identity=old.identity))
    answers = _ask(
        before.name, "prepare", kept.as_json(), new.isolation == "shared", seconds=max(1.0, deadline - time.monotonic())
    )
    _raise_first_error(before.name, answers)
    found = [how for answer in answers for how in answer["how"].values()]
    restarts = sorted({how.removeprefix("restart: ") for how in found if how.startswith("restart")})
    if restarts:
        _ask(before.name, "discard", seconds=ASK_SECONDS)
        # Another identity of the same kind: Ray Serve then starts new actors, and a later version finds them.
        marked = f"{_kind(new.identity)}.{config.models[0].deployment_id[:8]}"
        return "replaced", "; ".join(restarts), replace(config, process=replace(new, identity=marked))
    if "beside" in found:
        return "beside", "it needs an engine of its own", kept
    return ("swapped" if "swap" in found else "unchanged"), "same shapes, same settings", kept


def _kind(identity: str) -> str:
    return identity.partition(".")[0]


def _wait(
    application: str, config: ReplicaConfig, *, how: How, deadline: float, on_progress: Callable[[str], None]
) -> None:
    """Until as many replicas as were asked for say that they serve these models."""
    if how in ("started", "replaced"):
        wait_until_running(application, timeout_seconds=deadline - time.monotonic(), on_progress=on_progress)
    assert config.process is not None
    wanted = {settings.name: settings.deployment_id for settings in config.models}
    while True:
        said = describe(application)
        refusals = [one["refused"] for one in said if one["refused"]]
        if refusals:
            raise StageError(
                f"a replica of {application!r} refused the new version: {refusals[0]}",
                hint="the version that served before serves",
            )
        serving = [{name: facts["deployment_id"] for name, facts in one["models"].items()} for one in said]
        if len(serving) >= config.process.replicas and all(one == wanted for one in serving):
            _settle(application, config, seconds=max(1.0, deadline - time.monotonic()))
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"deployment {application!r}: {sum(one == wanted for one in serving)} of {config.process.replicas} "
                "replicas serve the new version, and the time is over",
                hint="raise ready_timeout_seconds; the replica's log is in Ray's log directory under serve/",
            )
        time.sleep(POLL_SECONDS)


def _settle(application: str, config: ReplicaConfig | None = None, *, seconds: float) -> None:
    """Wait until Ray Serve has done what it was told last; while it tells a replica, it does not count it as running.

    Args:
        application: harmless where it does not run.
        config: what it must have been told; None where that may be anything.
        seconds: after which the next step tells what is wrong.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = running_applications().get(application)
        if found is None:
            return
        is_told = config is None or found.config == config
        if is_told and not any(replica.state == "UPDATING" for replica in found.replicas):
            return
        time.sleep(POLL_SECONDS)


def _ask(application: str, method: str, *arguments: Any, seconds: float) -> list[Any]:
    """The answer of every running replica; an exception is an answer. Empty where none runs."""
    handle = serve.get_app_handle(application)
    try:
        answers: list[Any] = handle.broadcast(method, *arguments).results(timeout_s=seconds, return_exceptions=True)
    except (RayServeException, TimeoutError) as error:
        if isinstance(error, TimeoutError) and seconds > ASK_SECONDS:
            raise ClusterError(f"deployment {application!r}: no answer to {method!r} within {seconds:.0f} s") from error
        return []
    return answers


def _raise_first_error(application: str, answers: list[Any]) -> None:
    if not answers:
        raise ClusterError(f"deployment {application!r}: no replica answered", hint="look at `pipeline deployments`")
    failure: PipelineError | None = None
    for answer in answers:
        if isinstance(answer, RayError):
            failure = replica_error(application, str(answer))
        elif isinstance(answer, BaseException):
            failure = ClusterError(f"deployment {application!r}: {type(answer).__name__}: {answer}")
        elif "error" in answer:
            kind, message, hint = answer["error"]
            hint = f"{hint}; the version that served before serves" if hint else "the version that served before serves"
            failure = getattr(errors, kind)(f"{message}\n  (found by a running replica of {application!r})", hint=hint)
    if failure is not None:
        _ask(application, "discard", seconds=ASK_SECONDS)
        raise failure


def _running(name: str, found: Mapping[str, Any]) -> RunningApplication:
    deployment = found["deployments"][DEPLOYMENT]
    return RunningApplication(
        name=name,
        status=str(getattr(found["status"], "value", found["status"])),
        message=str(deployment.get("message") or found.get("message") or ""),
        route_prefix=str(found["route_prefix"] or "/"),
        config=read_config(deployment["deployment_config"]["user_config"]),
        replicas=tuple(
            RunningReplica(
                pid=replica.get("pid"),
                state=str(getattr(replica["state"], "value", replica["state"])),
                started_at=float(replica["start_time_s"]),
            )
            for replica in deployment["replicas"]
        ),
    )
