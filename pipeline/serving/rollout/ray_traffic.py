"""Trials on Ray Serve: a challenger beside its champion, and what the champion's replicas counted.

Owns the name of a challenger's application, how a trial reaches every replica, and how its counts come back. Loads no
jax. The one decision: the trial is part of the champion's configuration, so a replica that starts or restarts in the
middle of it takes part, and one call ends it everywhere.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from pipeline.cluster.ray_lock import cluster_lock
from pipeline.errors import ClusterError
from pipeline.serving.rollout.ray_rollout import describe, running_applications
from pipeline.serving.rollout.ray_serve import CHALLENGER_SUFFIX, delete, deploy
from pipeline.serving.traffic.traffic_conditions import Evidence, merged
from pipeline.serving.traffic.traffic_settings import TrafficSettings
from pipeline.serving.traffic.traffic_window import read_evidence

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.05
LOCK_SECONDS = 600.0
"""For another model of the application that is being started."""
ASK_SECONDS = 5.0
GONE_SECONDS = 60.0
"""For a challenger to leave."""


def challenger_application(model: str) -> str:
    """The application in which the challenger of a model runs."""
    return f"{model}{CHALLENGER_SUFFIX}"


def set_traffic(application: str, settings: TrafficSettings | None, *, timeout_seconds: float) -> None:
    """Begin a trial on every replica, or end the one that runs; the processes and models stay as they are.

    Raises:
        ClusterError: the application does not run, somebody else changed it for `LOCK_SECONDS`, or a replica did not
            take it within `timeout_seconds` after that.
    """
    wanted: Mapping[str, Any] = {} if settings is None else settings.as_json()
    # The whole configuration is read and written back: nobody else may change it in between.
    with cluster_lock(application, timeout_seconds=LOCK_SECONDS, on_wait=_LOG.info):
        running = running_applications().get(application)
        if running is None:
            raise ClusterError(f"deployment {application!r} does not run any more", hint="see `pipeline deployments`")
        if dict(running.config.traffic) == dict(wanted):
            return
        deploy(application, replace(running.config, traffic=wanted))
    deadline = time.monotonic() + timeout_seconds
    while True:
        found = [dict(one["traffic"]) for one in describe(application)]
        if found and all(one == dict(wanted) for one in found):
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"deployment {application!r}: its replicas did not take the new traffic in time")
        time.sleep(POLL_SECONDS)


def collect(application: str, *, trial_id: str) -> Evidence | None:
    """What all replicas counted for this trial; None where none of them answered or knows it. Keeps it alive."""
    try:
        handle = serve.get_app_handle(application)
        reports = handle.broadcast("judged_traffic").results(timeout_s=ASK_SECONDS, return_exceptions=True)
    except (RayServeException, TimeoutError):
        return None
    parts = [
        read_evidence(report["evidence"])
        for report in reports
        if isinstance(report, Mapping) and (report.get("trial") or {}).get("trial_id") == trial_id
    ]
    return merged(parts) if parts else None


def take_down(application: str) -> None:
    """Delete an application and wait until it is gone; harmless where there is none.

    Raises:
        ClusterError: it is still there after a minute.
    """
    delete(application)
    deadline = time.monotonic() + GONE_SECONDS
    while application in serve.status().applications:
        if time.monotonic() > deadline:
            raise ClusterError(f"application {application!r} is still there after {GONE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
