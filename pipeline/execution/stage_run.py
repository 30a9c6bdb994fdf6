"""One stage inside one run: its state, and how it gets from pending to an end.

Owns the state machine of a stage. Knows nothing of other stages but their commits. The one decision: every change of
state goes through `_change`, which tells the journal first, then the tracker and the observer; what a reader sees is
never ahead of what is stored.
"""

import time as wall
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.commit import Commit, CommittedInput, replace_commit
from pipeline.artifacts.store import Store
from pipeline.errors import FailureClass, PipelineError
from pipeline.execution.backend import Attempt, Failure, InputRequest, WorkOutcome, WorkRequest
from pipeline.execution.heartbeat import Heartbeat
from pipeline.execution.journal import Journal, attempt_key
from pipeline.execution.observer import Observer
from pipeline.execution.reading import remember_commit
from pipeline.execution.retry import next_delay
from pipeline.plan.stage import Hop, ResolvedStage
from pipeline.stages.parameters import PythonCallParameters
from pipeline.stages.protocol import Report, Resources
from pipeline.stages.registry import Framework
from pipeline.tracking.protocol import Tracker
from pipeline.tracking.view import AttemptView, HopView, StageStatus, StageView

REPORTS_FLUSH_SECONDS = 5.0
ENDED = (StageStatus.DONE, StageStatus.REUSED, StageStatus.FAILED, StageStatus.SKIPPED, StageStatus.INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunScope:
    """What all stages of a run share."""

    run_id: str
    flow: str
    project_root: Path
    ephemeral: bool
    store: Store
    journal: Journal
    tracker: Tracker
    observer: Observer
    heartbeat: Heartbeat
    environment: Mapping[str, str]
    clock: Callable[[], float] = field(default=wall.time)


def fingerprint_lease(fingerprint: str) -> str:
    """Name of the lease that lets one run compute a fingerprint."""
    return f"fingerprints/{fingerprint}"


class StageRun:
    """The state of one stage. The runner calls; nothing here decides what runs next."""

    def __init__(self, stage: ResolvedStage, *, scope: RunScope, first_attempt: int) -> None:
        self.stage = stage
        self.scope = scope
        self.commit: Commit | None = None
        self.failure: Failure | None = None
        self.retry_at: float | None = None
        self.lease: str | None = None
        """Name of the lease on its fingerprint, held from before its start through its retries."""
        self.view = StageView(
            name=stage.name, kind=stage.kind.name, status=StageStatus.PENDING, reason="", needs=stage.needs
        )
        self._attempt: Attempt | None = None
        self._hops_left = stage.fallback
        self._has_committed = False
        self._number = first_attempt - 1
        self._first_number = first_attempt
        self._deadline: float | None = None
        self._reports: list[Report] = []
        self._flushed_at = 0.0
        self._resources = stage.resources

    @property
    def has_ended(self) -> bool:
        """True where nothing more will happen to it."""
        return self.view.status in ENDED

    @property
    def is_good(self) -> bool:
        """True where what depends on it may start."""
        return self.view.status in (StageStatus.DONE, StageStatus.REUSED)

    def take_lease(self, fingerprint: str) -> bool:
        """Hold the fingerprint's lease, and no other; False where another run or stage computes it."""
        name = fingerprint_lease(fingerprint)
        if self.lease != name:
            self.drop_lease()
            if self.scope.heartbeat.acquire(name) is None:
                return False
            self.lease = name
        return True

    def drop_lease(self) -> None:
        """Let others compute what it computed, where it held a lease."""
        name, self.lease = self.lease, None
        if name is not None:
            self.scope.heartbeat.drop(name)

    def skip(self, reason: str) -> None:
        """It will not run."""
        self._change(status=StageStatus.SKIPPED, reason=reason)

    def wait(self, *, fingerprint: str, reason: str) -> None:
        """Another run computes it."""
        if self.view.status is not StageStatus.WAITING:
            self._change(status=StageStatus.WAITING, fingerprint=fingerprint, reason=reason)
        self.scope.observer.waiting(self.stage.name, reason)

    def reuse(self, commit: Commit, *, reason: str) -> None:
        """A committed artifact stands in for it."""
        self.drop_lease()
        self.commit, self._has_committed = commit, True
        changes = {"status": StageStatus.REUSED, "reason": reason, **_committed(commit), **self._judge(commit)}
        self._change(fingerprint=commit.fingerprint, producer_run_id=commit.run_id, **changes)
        self.scope.tracker.record_reuse(self.scope.run_id, self.view, parameters=self._parameters())
        self._fall_back()

    def start(
        self,
        *,
        fingerprint: str,
        reason: str,
        inputs: Mapping[str, InputRequest],
        resources: Resources,
        launch: Callable[[WorkRequest], Attempt],
        environment: Mapping[str, str],
    ) -> None:
        """Start the next attempt; it holds the fingerprint's lease.

        `environment` is what this stage knows of the cluster and the flow beside what every stage knows.
        """
        now = self.scope.clock()
        self._number += 1
        self._resources = resources
        timeout = self.stage.timeout_seconds
        self._deadline = None if timeout is None else now + timeout
        self._reports, self._flushed_at, self.retry_at = [], now, None
        request = self._request(fingerprint=fingerprint, inputs=inputs, environment=environment)
        attempt = AttemptView(attempt=self._number, started_at=now)
        self._change(
            status=StageStatus.RUNNING, fingerprint=fingerprint, reason=reason, attempts=(*self.view.attempts, attempt)
        )
        self.scope.tracker.start_attempt(
            self.scope.run_id, self.view, attempt=self._number, parameters=self._parameters()
        )
        self._attempt = launch(request)

    def advance(self, *, parts: Mapping[str, Any], inputs: Mapping[str, CommittedInput]) -> None:
        """Take in what the running attempt reported, and its end."""
        attempt = self._attempt
        if attempt is None:
            return
        outcome = attempt.poll()
        self._take(attempt.drain())
        now = self.scope.clock()
        if outcome is None:
            state = attempt.state()
            if state != "running":
                self.scope.observer.waiting(self.stage.name, state)
            if self._deadline is None or now < self._deadline:
                return
            attempt.end()
            message = f"timed out after timeout_seconds: {self.stage.timeout_seconds:g}"
            outcome = WorkOutcome(failure=Failure(failure_class=FailureClass.INFRA, error="Timeout", message=message))
        attempt.end()
        self._attempt = None
        if outcome.failure is not None:
            self._fail(outcome.failure)
        else:
            self._finish(outcome, parts=parts, inputs=inputs)

    def fail_before_start(self, error: PipelineError) -> None:
        """It cannot be started at all."""
        self.drop_lease()  # a fallback asks for it anew
        self.failure = Failure(failure_class=error.failure_class, error=type(error).__name__, message=str(error))
        self._change(status=StageStatus.FAILED, reason=str(error))
        self._fall_back()

    def interrupt(self) -> None:
        """End it now; what it committed (training checkpoints) stays."""
        if self._attempt is not None:
            self._take(self._attempt.drain())
            self._attempt.end()
            self._attempt = None
            self._end_attempt(StageStatus.INTERRUPTED, error="interrupted", failure_class=None)
            self._close_attempt()
        elif not self.has_ended:
            self._change(status=StageStatus.INTERRUPTED, reason="the run was interrupted before it started")

    def _request(
        self, *, fingerprint: str, inputs: Mapping[str, InputRequest], environment: Mapping[str, str]
    ) -> WorkRequest:
        stage, scope = self.stage, self.scope
        parameters = stage.parameters
        framework = stage.kind.framework
        run = stage.kind.run
        if isinstance(parameters, PythonCallParameters):
            framework, run = Framework(parameters.framework), parameters.call
        none = replace(self._resources, cpus=0.0, gpus=0.0, memory_bytes=0, labels={})
        return WorkRequest(
            kind=stage.kind.name,
            run=run,
            framework=framework,
            store_url=scope.store.url,
            run_id=scope.run_id,
            flow=scope.flow,
            stage=stage.name,
            attempt=self._number,
            fingerprint=fingerprint,
            parameters=parameters,
            inputs=inputs,
            output_types=stage.outputs,
            attempt_key=f"artifacts/{fingerprint}/{scope.run_id}-{self._number}",
            workspace_key=f"workspaces/{fingerprint}",
            log_key=f"{attempt_key(scope.run_id, stage.name, self._number)}/output.log",
            project_root=str(scope.project_root),
            resources=self._resources,
            actor_resources=none if stage.kind.delegates else self._resources,
            deadline=self._deadline,
            ephemeral=scope.ephemeral,
            environment={**scope.environment, **environment},
        )

    def _take(self, reports: list[Report]) -> None:
        if not reports:
            return
        self._reports.extend(reports)
        self.scope.tracker.report(self.scope.run_id, self.stage.name, attempt=self._number, reports=reports)
        for report in reports:
            self.scope.observer.reported(self.stage.name, report)
        if self.scope.clock() - self._flushed_at > REPORTS_FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self.scope.journal.write_reports(self.stage.name, self._number, self._reports)
        self._flushed_at = self.scope.clock()

    def _finish(self, outcome: WorkOutcome, *, parts: Mapping[str, Any], inputs: Mapping[str, CommittedInput]) -> None:
        scope, fingerprint = self.scope, self.view.fingerprint or ""
        scope.heartbeat.check(fingerprint_lease(fingerprint))
        mine = Commit(
            fingerprint=fingerprint,
            attempt_key=f"artifacts/{fingerprint}/{scope.run_id}-{self._number}",
            kind=self.stage.kind.name,
            stage=self.stage.name,
            flow=scope.flow,
            run_id=scope.run_id,
            created_at=scope.clock(),
            outputs=outcome.outputs,
            inputs=inputs,
            metrics=outcome.metrics,
            facts=outcome.facts,
            parts=parts,
            attempt=self._number,
        )
        self.commit = replace_commit(scope.store, mine)
        self._has_committed = True
        remember_commit(scope.store, self.commit)
        self.drop_lease()
        scope.store.delete(f"workspaces/{fingerprint}")
        judged = self._judge(self.commit)
        self._end_attempt(
            StageStatus.DONE,
            stage_status=judged.pop("status", StageStatus.DONE),
            producer_run_id=self.commit.run_id,
            **_committed(self.commit),
            **judged,
        )
        self._close_attempt()
        self._fall_back()

    def _judge(self, commit: Commit) -> dict[str, Any]:
        """The verdicts, and what they change: a gate that does not hold fails the stage, whose artifact stays."""
        verdicts = tuple(gate.judge(commit.metrics) for gate in self.stage.gates)
        failing = [verdict for verdict in verdicts if not verdict.holds]
        if not failing:
            return {"gates": verdicts}
        message = f"stage {self.stage.name!r}: gate {'; '.join(str(verdict) for verdict in failing)}"
        self.failure = Failure(failure_class=FailureClass.GATE, error="GateError", message=message)
        return {"gates": verdicts, "status": StageStatus.FAILED, "reason": message}

    def _fail(self, failure: Failure) -> None:
        delay = next_delay(
            failure.failure_class,
            attempt=self._number - self._first_number + 1,
            max_attempts=self.stage.retry.max_attempts,
            backoff_seconds=self.stage.retry.backoff_seconds,
        )
        if delay is None:
            self.failure = failure
            self._end_attempt(
                StageStatus.FAILED,
                error=failure.message,
                failure_class=failure.failure_class.value,
                reason=failure.message.splitlines()[0],
            )
            self.drop_lease()
        else:
            self.retry_at = self.scope.clock() + delay
            self._end_attempt(
                StageStatus.FAILED,
                error=failure.message,
                failure_class=failure.failure_class.value,
                stage_status=StageStatus.PENDING,
                reason=f"attempt {self._number} failed ({failure.message.splitlines()[0]}); next in {delay:g} s",
            )
        self._close_attempt()
        self._fall_back()

    def _fall_back(self) -> None:
        """Where the stage has failed for good, go on with the next hop that is for such a failure.

        Once it has committed something (its own gate failed then), what was there before has been replaced already, so
        no hop that keeps it fits any more.
        """
        failure = self.failure
        if failure is None:
            return
        fitting = [
            index
            for index, hop in enumerate(self._hops_left)
            if failure.failure_class in hop.on and not (hop.stage is None and self._has_committed)
        ]
        if not fitting:
            return
        hop = self._hops_left[fitting[0]]
        self._hops_left = self._hops_left[fitting[0] + 1 :]
        self._take_hop(hop, failure)

    def _take_hop(self, hop: Hop, failure: Failure) -> None:
        error = failure.message.splitlines()[0]
        told = HopView(
            time=self.scope.clock(),
            after_attempt=self._number,
            failure_class=failure.failure_class.value,
            error=error,
            to=str(hop),
        )
        self.failure, self.retry_at = None, None
        hops = (*self.view.hops, told)
        if hop.stage is None:
            self._change(status=StageStatus.SKIPPED, reason=f"the champion stays: {error}", hops=hops)
            return
        self.stage, self.commit = replace(hop.stage, fallback=self._hops_left), None
        self._first_number = self._number + 1
        self._change(status=StageStatus.PENDING, reason=f"falls back to {hop}: {error}", hops=hops, gates=())

    def _end_attempt(
        self,
        status: StageStatus,
        *,
        error: str | None = None,
        failure_class: str | None = None,
        stage_status: StageStatus | None = None,
        **changes: Any,
    ) -> None:
        ended = replace(
            self.view.attempts[-1],
            ended_at=self.scope.clock(),
            status=status,
            error=error,
            failure_class=failure_class,
        )
        self._flush()
        self._change(status=stage_status or status, attempts=(*self.view.attempts[:-1], ended), **changes)

    def _close_attempt(self) -> None:
        key = attempt_key(self.scope.run_id, self.stage.name, self._number)
        log = self.scope.store.local_path(f"{key}/output.log") if self.scope.store.is_local else None
        self.scope.tracker.finish_attempt(
            self.scope.run_id, self.view, attempt=self._number, log_path=log if log and log.exists() else None
        )

    def _change(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)
        self.scope.journal.stage_event(self.view, time=self.scope.clock())
        self.scope.observer.stage_changed(self.view)

    def _parameters(self) -> dict[str, object]:
        return dict(self.stage.parameters.model_dump(mode="json"))


def _committed(commit: Commit) -> dict[str, Any]:
    return {
        "metrics": commit.metrics,
        "facts": commit.facts,
        "digests": {name: output.digest for name, output in commit.outputs.items()},
    }
