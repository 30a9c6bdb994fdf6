"""Runs attempts as Ray actors.

Owns the actors and how they are told what they may use. The one decision: feasibility is checked against the live
cluster before an actor is asked for, and while one waits the reason is shown, so nothing waits without a word.
"""

import contextlib
import os
import time
from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from pipeline.cluster import ray_connection
from pipeline.cluster.capacity import Capacity
from pipeline.cluster.ray_placement import remove_groups
from pipeline.errors import ClusterError, FailureClass
from pipeline.execution.backend import Failure, WorkOutcome, WorkRequest
from pipeline.execution.ray_worker import StageWorker
from pipeline.stages.protocol import Report, Resources

# Passed on to the attempt's process where the driver has them: where models, caches and libraries may look.
PASSED_VARIABLES = ("HF_HUB_OFFLINE", "JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH")
SCHEDULE_SECONDS = 120.0
HEAD_LOOK_SECONDS = 2.0
HEAD_FAILURES = 8
"""A network that is away for a few seconds must not end a run of days; Ray itself ends this process after a minute."""
_DRAIN_TIMEOUT_SECONDS = 5.0


class HeadWatch:
    """Whether the head still listens; asked every `HEAD_LOOK_SECONDS`, gone for good after `HEAD_FAILURES` noes.

    Ray would wait a minute for its head and then end this process, before the run's end is written anywhere.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._num_failures = 0
        self._looked_at = time.monotonic()

    @property
    def why(self) -> str:
        """For the error."""
        return f"the Ray head at {self.address} does not answer any more"

    def is_gone(self) -> bool:
        """True where it did not answer `HEAD_FAILURES` times in a row."""
        if time.monotonic() - self._looked_at >= HEAD_LOOK_SECONDS:
            self._look()
        return self._num_failures >= HEAD_FAILURES

    def is_found(self) -> bool:
        """Look now, and until it answers or is gone; True where it answered.

        Asked before a call that speaks to the head: Ray would block in it for a minute and then end this process.
        """
        while not self._look():
            if self._num_failures >= HEAD_FAILURES:
                return False
            time.sleep(HEAD_LOOK_SECONDS)
        return True

    def _look(self) -> bool:
        if self._num_failures >= HEAD_FAILURES:
            return False
        self._looked_at = time.monotonic()
        answered = ray_connection.answers(self.address)
        self._num_failures = 0 if answered else self._num_failures + 1
        return answered


class RayAttempt:
    """One actor."""

    def __init__(self, request: WorkRequest, *, head: "HeadWatch") -> None:
        self._head = head
        asked = request.actor_resources
        self._asked = asked
        self._name = f"{request.run_id}/{request.stage}/{request.attempt}"
        self._actor = (
            ray.remote(StageWorker)
            .options(
                num_cpus=asked.cpus,
                num_gpus=asked.gpus,
                memory=asked.memory_bytes or None,
                label_selector=dict(asked.labels) or None,
                max_concurrency=8,
                max_restarts=0,
                name=self._name,
                runtime_env={"env_vars": _environment(request, asked)},
            )
            .remote()
        )
        self._started = self._actor.process_id.remote()
        self._outcome = self._actor.run.remote(request)
        self._asked_at = time.monotonic()
        self._is_running = False

    def drain(self) -> list[Report]:
        """See `Attempt.drain`; empty while the actor is not up or is gone."""
        if not self._is_running or self._head.is_gone():
            return []
        try:
            reports: list[Report] = ray.get(self._actor.drain.remote(), timeout=_DRAIN_TIMEOUT_SECONDS)
        except RayError:
            return []  # a dead actor is told by poll, a busy one is asked again
        return reports

    def poll(self) -> WorkOutcome | None:
        """See `Attempt.poll`."""
        if self._head.is_gone():
            return _infrastructure(self._head.why, None)
        if not self._is_running:
            self._is_running = self._has_started()
        ready, _ = ray.wait([self._outcome], timeout=0)
        if ready:
            try:
                outcome: WorkOutcome = ray.get(self._outcome)
            except RayActorError as error:
                return _infrastructure(f"the stage's process died: {_first_lines(error)}", error)
            except RayError as error:
                return _infrastructure(f"Ray failed: {_first_lines(error)}", error)
            return outcome
        if not self._is_running and time.monotonic() - self._asked_at > SCHEDULE_SECONDS:
            self.end()
            return _infrastructure(f"not scheduled within {SCHEDULE_SECONDS:g} s: {self.state()}", None)
        return None

    def state(self) -> str:
        """See `Attempt.state`."""
        if self._is_running:
            return "running"
        free = ray_connection.available()
        if self._asked.cpus <= free.get("CPU", 0.0) and (self._asked.gpus or 0.0) <= free.get("GPU", 0.0):
            return "starting its process"
        shown = ", ".join(f"{value:g} {name}" for name, value in free.items()) or "nothing"
        return f"waiting for {self._asked.cpus:g} CPUs, {self._asked.gpus:g} GPUs; free now: {shown}"

    def end(self) -> None:
        """See `Attempt.end`."""
        if not self._head.is_found():
            return  # what ran on it ends with it
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)
            remove_groups(self._name)

    def _has_started(self) -> bool:
        ready, _ = ray.wait([self._started], timeout=0)
        if not ready:
            return False
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(self._started, timeout=1)
            return True
        return False


class RayBackend:
    """`Backend` on a Ray cluster this process connects to."""

    def __init__(self, *, address: str, verbose: bool) -> None:
        self._capacity = ray_connection.connect(address, verbose=verbose)
        self._head = HeadWatch(address)

    def capacity(self) -> Capacity:
        """See `Backend.capacity`.

        Raises:
            ClusterError: the head is gone; no attempt can be started.
        """
        if not self._head.is_found():
            raise ClusterError(self._head.why, hint="`pipeline rerun RUN_ID` takes the run up on a new head")
        return self._capacity

    def start(self, request: WorkRequest) -> RayAttempt:
        """See `Backend.start`."""
        return RayAttempt(request, head=self._head)

    def close(self) -> None:
        """See `Backend.close`; to a head that is gone there is nothing to say."""
        if not self._head.is_gone():
            ray_connection.disconnect()


def _environment(request: WorkRequest, asked: Resources) -> Mapping[str, str]:
    threads = str(max(1, int(asked.cpus or len(os.sched_getaffinity(0)))))
    environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {**environment, "OMP_NUM_THREADS": threads, "PIPELINE_STAGE": request.stage}


def _infrastructure(message: str, error: BaseException | None) -> WorkOutcome:
    return WorkOutcome(
        failure=Failure(
            failure_class=FailureClass.INFRA,
            error=type(error).__name__ if error else "NotScheduled",
            message=message,
            traceback=str(error or ""),
        )
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])[:600]
