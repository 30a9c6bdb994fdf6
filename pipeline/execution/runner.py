"""Makes a plan happen: starts what is ready, follows it, ends when nothing is left to do.

Owns the order of things in one run. Knows nothing of Ray or MLflow. The one decision: planning and running are the
same code path stage by stage; a stage is planned again the moment its inputs are committed, so what is reused is
decided on what is true then.
"""

import time as wall
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.artifacts.commit import Commit, CommittedInput, find_commit
from pipeline.errors import ArtifactError, Interrupted, PipelineError
from pipeline.execution.backend import Backend, Failure, InputRequest
from pipeline.execution.demand import assign, check_here, check_possible, possible, serving_plan
from pipeline.execution.reading import Reading
from pipeline.execution.stage_run import RunScope, StageRun
from pipeline.plan.planner import Action, PlannedStage, plan_stage
from pipeline.plan.stage import ResolvedStage
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.registry import Location
from pipeline.tracking.view import RunStatus, StageView

POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended."""

    status: RunStatus
    stages: tuple[StageView, ...]
    failure: Failure | None


class Runner:
    """Runs the stages of one flow once."""

    def __init__(
        self,
        stages: Sequence[ResolvedStage],
        *,
        scope: RunScope,
        reading: Reading,
        make_backend: Callable[[], Backend],
        driver_backend: Backend,
        is_interrupted: Callable[[], bool],
        first_attempts: Mapping[str, int],
        sleep: Callable[[float], None] = wall.sleep,
    ) -> None:
        self._scope = scope
        self._reading = reading
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._driver_backend = driver_backend
        self._is_interrupted = is_interrupted
        self._sleep = sleep
        self._runs = {
            stage.name: StageRun(stage, scope=scope, first_attempt=first_attempts.get(stage.name, 1))
            for stage in stages
        }
        self._plans: dict[str, PlannedStage] = {}

    def run(self) -> RunEnd:
        """Until every stage has ended, or the user interrupts.

        Raises:
            LeaseError: another process took the run over.
        """
        try:
            while not all(run.has_ended for run in self._runs.values()):
                if self._is_interrupted():
                    raise Interrupted("interrupted")
                self._scope.heartbeat.check(f"runs/{self._scope.run_id}")
                for run in self._runs.values():
                    self._advance(run)
                self._sleep(POLL_SECONDS)
        except (Interrupted, KeyboardInterrupt):
            self._end_all()
            return self._end(RunStatus.INTERRUPTED)
        except BaseException:
            self._end_all()
            raise
        finally:
            if self._backend is not None:
                self._backend.close()
        failed = any(run.failure is not None for run in self._runs.values())
        return self._end(RunStatus.FAILED if failed else RunStatus.DONE)

    def _end(self, status: RunStatus) -> RunEnd:
        failures = [run.failure for run in self._runs.values() if run.failure is not None]
        return RunEnd(
            status=status,
            stages=tuple(run.view for run in self._runs.values()),
            failure=failures[0] if failures else None,
        )

    def _end_all(self) -> None:
        for run in self._runs.values():
            run.interrupt()

    def _advance(self, run: StageRun) -> None:
        if run.has_ended:
            return
        name = run.stage.name
        if name in self._plans and run.view.attempts and run.view.attempts[-1].ended_at is None:
            run.advance(parts=self._plans[name].parts, inputs=self._committed_inputs(run.stage))
            return
        needs = [self._runs[need] for need in run.stage.needs]
        bad = [need for need in needs if need.has_ended and not need.is_good]
        if bad:
            run.skip(f"{', '.join(need.stage.name for need in bad)} did not succeed")
        elif all(need.is_good for need in needs) and (run.retry_at is None or self._scope.clock() >= run.retry_at):
            try:
                self._begin(run)
            except PipelineError as error:
                run.fail_before_start(error)

    def _begin(self, run: StageRun) -> None:
        plan = self._plan(run)
        self._plans[run.stage.name] = plan
        if plan.action is Action.REUSE and plan.commit is not None:
            run.reuse(plan.commit, reason=plan.reason)
            return
        fingerprint = plan.fingerprint
        if fingerprint is None:
            raise ArtifactError(f"stage {run.stage.name!r}: its inputs are committed and still it has no fingerprint")
        if not run.take_lease(fingerprint):
            run.wait(fingerprint=fingerprint, reason="another run computes this fingerprint; waiting for its commit")
            return
        if not self._recheck(run, plan):
            self._start(run, plan, fingerprint=fingerprint)

    def _recheck(self, run: StageRun, plan: PlannedStage) -> bool:
        """Look again under the lease: reuse what another run committed meanwhile."""
        commit = find_commit_or_none(self._scope, plan.fingerprint or "")
        if commit is None or run.stage.name in self._reading.force:
            return False
        if self._reading.verify(run.stage, commit) is not None:
            return False
        run.reuse(commit, reason=f"committed by run {commit.run_id} meanwhile")
        return True

    def _start(self, run: StageRun, plan: PlannedStage, *, fingerprint: str) -> None:
        if run.stage.kind.location is Location.DRIVER:
            backend = self._driver_backend
        else:
            if self._backend is None:
                self._backend = self._connect()
            backend = self._backend
        capacity = backend.capacity()
        if backend is not self._driver_backend:
            check_here(run.stage, capacity)
        resources, reason = assign(run.stage, capacity)
        run.start(
            fingerprint=fingerprint,
            reason=plan.reason,
            inputs=self._input_requests(run.stage),
            resources=resources,
            launch=backend.start,
            environment=self._environment_of(run.stage, backend),
        )
        if run.stage.kind.auto_gpus:
            self._scope.observer.waiting(run.stage.name, reason)

    def _environment_of(self, stage: ResolvedStage, backend: Backend) -> Mapping[str, str]:
        """A deployment is told of the flow's other deployments: together they decide who shares a process."""
        if not isinstance(stage.parameters, DeployServeParameters):
            return {}
        plan = serving_plan([run.stage for run in self._runs.values()], backend.capacity())
        return {"serving_plan": plan.to_text()}

    def _connect(self) -> Backend:
        backend = self._make_backend()
        capacity = backend.capacity()
        check_possible([possible(run.stage, capacity) for run in self._runs.values() if not run.has_ended], capacity)
        return backend

    def _plan(self, run: StageRun) -> PlannedStage:
        reading = self._reading
        return plan_stage(
            run.stage,
            commits={name: other.commit for name, other in self._runs.items() if other.commit is not None},
            lookup=reading.lookup,
            sources=reading.sources,
            verify=reading.verify,
            previous=reading.previous,
            force=reading.force,
            now=self._scope.clock(),
        )

    def _committed_inputs(self, stage: ResolvedStage) -> dict[str, CommittedInput]:
        found = {}
        for name, reference in stage.inputs.items():
            commit = self._commit_of(reference.stage)
            found[name] = CommittedInput(
                stage=reference.stage,
                output=reference.output,
                fingerprint=commit.fingerprint,
                digest=commit.outputs[reference.output].digest,
            )
        return found

    def _input_requests(self, stage: ResolvedStage) -> dict[str, InputRequest]:
        found = {}
        for name, reference in stage.inputs.items():
            commit = self._commit_of(reference.stage)
            found[name] = InputRequest(
                stage=reference.stage,
                output=reference.output,
                key=f"{commit.attempt_key}/{reference.output}",
                fingerprint=commit.fingerprint,
                digest=commit.outputs[reference.output].digest,
                run_id=commit.run_id,
                metrics=commit.metrics,
                gates=self._runs[reference.stage].view.gates,
            )
        return found

    def _commit_of(self, stage: str) -> Commit:
        commit = self._runs[stage].commit
        if commit is None:
            raise ArtifactError(f"stage {stage!r} has no commit yet")
        return commit


def find_commit_or_none(scope: RunScope, fingerprint: str) -> Commit | None:
    """The readable commit of a fingerprint; an unreadable one is moved aside."""
    try:
        return find_commit(scope.store, fingerprint)
    except ArtifactError:
        from_key = f"artifacts/{fingerprint}/COMMIT.json"
        scope.store.move(from_key, f"artifacts/{fingerprint}/REJECTED-{scope.run_id}.json")
        return None
