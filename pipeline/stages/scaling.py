"""How many replicas a deployment has.

Owns the way from `autoscaling` of a flow to Ray Serve's own names, and waking a deployment that has gone to sleep.
Loads no jax. The one decision: Ray Serve scales, by the requests in flight in each replica; nothing here counts any.
"""

import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

from pipeline.errors import ClusterError, ParameterError
from pipeline.serving.rollout.ray_rollout import running_applications
from pipeline.serving.rollout.ray_serve import Endpoint
from pipeline.stages.deployment import Watch
from pipeline.stages.parameters import DeployServeParameters

POLL_SECONDS = 0.2
ONGOING_REQUESTS = 8
"""That a replica should have, where the flow names neither these nor slots."""


def least_replicas(parameters: DeployServeParameters) -> int:
    """Replicas that a deployment starts with.

    Raises:
        ParameterError: the flow names a number and a range.
    """
    if parameters.autoscaling is None:
        return parameters.replicas
    if "replicas" in parameters.model_fields_set:
        raise ParameterError(
            f"replicas: {parameters.replicas} and autoscaling exclude each other",
            hint="leave `replicas` out, or use autoscaling: {min_replicas, max_replicas}",
        )
    # Even one that may sleep starts awake: its first request is the stage's own.
    return max(1, parameters.autoscaling.min_replicas)


def autoscaling_of(parameters: DeployServeParameters, *, isolation: str) -> dict[str, Any] | None:
    """Fields of Ray Serve's `AutoscalingConfig`; None where the number of replicas is fixed.

    Raises:
        ParameterError: the deployment shares its process with others, which cannot come and go with its requests.
    """
    given = parameters.autoscaling
    if given is None:
        return None
    if isolation == "shared":
        raise ParameterError(
            f"autoscaling: {parameters.name!r} shares its process with other models, which would come and go with it",
            hint="use isolation: process, or leave autoscaling out",
        )
    idle = given.idle_delay_seconds
    return {
        "min_replicas": given.min_replicas,
        "max_replicas": given.max_replicas,
        "initial_replicas": max(1, given.min_replicas),
        "target_ongoing_requests": float(given.target_ongoing_requests or parameters.slots or ONGOING_REQUESTS),
        "upscale_delay_s": given.upscale_delay_seconds,
        "downscale_delay_s": given.downscale_delay_seconds,
        "downscale_to_zero_delay_s": given.downscale_delay_seconds if idle is None else idle,
        "look_back_period_s": given.averaging_seconds,
    }


def wake(application: str, *, at: Endpoint, watch: Watch) -> None:
    """Ask a deployment that sleeps, and wait until a replica runs; harmless where there is none, or it is awake.

    Raises:
        ClusterError: it does not wake in time.
    """
    found = running_applications().get(application)
    if found is None or found.num_running or not _may_sleep(found.config.process):
        return
    url = f"{replace(at, route_prefix=found.route_prefix).url}/health"
    watch.note(f"{application} sleeps; waking it")
    # A replica on its way out still answers; asking goes on until one is there to stay.
    while not (found := running_applications().get(application)) or not found.num_running:
        if time.monotonic() > watch.deadline:
            raise ClusterError(f"{application!r} does not wake", hint="raise ready_timeout_seconds")
        try:
            with urllib.request.urlopen(url, timeout=watch.seconds_left) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()  # the ingress answers 503 until a replica does
        except OSError as error:
            raise ClusterError(f"{url}: {error}", hint="look at Ray's log directory, serve/") from error
        time.sleep(POLL_SECONDS)


def _may_sleep(process: Any) -> bool:
    return process is not None and (process.autoscaling or {}).get("min_replicas") == 0
