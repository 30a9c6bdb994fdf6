"""A new version proves itself beside the one that serves: shadow first, then canary.

Owns the order: start the challenger, share the traffic, judge, end. Loads no jax. The one decision: whatever happens,
the champion ends up with all requests and the challenger is gone; taking over is another step, which a lost trial never
reaches.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipeline.artifacts.store import open_store
from pipeline.errors import ClusterError, GateError
from pipeline.serving.replica_settings import ProcessSettings, ReplicaSettings, same_executables
from pipeline.serving.rollout.deployment_record import (
    DeploymentEvent,
    VersionReference,
    append_event,
    operator,
    recorded_settings,
)
from pipeline.serving.rollout.ray_rollout import running_applications
from pipeline.serving.rollout.ray_serve import Endpoint
from pipeline.serving.rollout.ray_traffic import challenger_application, collect, set_traffic, take_down
from pipeline.serving.traffic.traffic_conditions import Evidence, measured
from pipeline.serving.traffic.traffic_judge import Judgement, Verdict, judge
from pipeline.serving.traffic.traffic_settings import Mode, TrafficSettings
from pipeline.stages.deployment import Watch, bring
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import StageContext
from pipeline.stages.traffic_parameters import CanaryParameters, ShadowParameters

JUDGE_SECONDS = 0.5
SWITCH_SECONDS = 60.0
Parameters = CanaryParameters | ShadowParameters
SILENT_SECONDS = 20.0
"""No replica says anything of the trial for so long: it cannot be judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """How one trial ended."""

    mode: Mode
    judgement: Judgement
    evidence: Evidence
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """For the tracker, each name beginning with the mode."""
        arms = {"requests": self.evidence.challenger, "champion_requests": self.evidence.champion}
        found = {
            **measured(self.evidence),
            **{name: float(arm.judged) for name, arm in arms.items()},
            "errors": float(self.evidence.challenger.failed),
            "champion_errors": float(self.evidence.champion.failed),
            "seconds": self.seconds,
        }
        copies = self.evidence.copies
        if copies is not None:
            found |= {
                "compared": float(copies.equal + copies.different + copies.num_cosines),
                "dropped": float(copies.dropped),
            }
        return {f"{self.mode}_{name}": value for name, value in found.items()}


def planned(*, canary: CanaryParameters | None, shadow: bool | ShadowParameters) -> list[tuple[Mode, Parameters]]:
    """The trials that a flow asks for, in their order."""
    trials: list[tuple[Mode, Parameters]] = []
    if shadow:
        trials.append(("shadow", ShadowParameters.model_validate({}) if isinstance(shadow, bool) else shadow))
    if canary is not None:
        trials.append(("canary", canary))
    return trials


def hold_trials(
    settings: ReplicaSettings,
    *,
    application: str,
    process: ProcessSettings,
    at: Endpoint,
    trials: Sequence[tuple[Mode, Parameters]],
    prompt: str,
    watch: Watch,
    seconds_left: Callable[[], float],
) -> list[TrialResult]:
    """Start the challenger, hold the trials until one is lost, and take it down.

    Args:
        settings: of the challenger.
        application: of the champion.
        process: of the challenger's actor.
        at: where Ray Serve listens.
        trials: from `planned`.
        prompt: of the challenger's first request.
        watch: deadline of the start, and listeners.
        seconds_left: of the stage.

    Raises:
        PipelineError: the challenger cannot be had; the champion never noticed.
        ClusterError: nothing is heard of the trial any more.
    """
    results: list[TrialResult] = []
    with _challenger(settings, process=process, at=at, prompt=prompt, watch=watch) as url:
        for mode, parameters in trials:
            results.append(
                _hold(
                    settings.name,
                    mode=mode,
                    parameters=parameters,
                    application=application,
                    url=url,
                    watch=watch,
                    seconds_left=seconds_left,
                )
            )
            watch.note(f"{mode}: {results[-1].judgement.verdict}: {results[-1].judgement.reason}")
            if results[-1].judgement.verdict is not Verdict.PROMOTE:
                break
    return results


@contextmanager
def _challenger(
    settings: ReplicaSettings, *, process: ProcessSettings, at: Endpoint, prompt: str, watch: Watch
) -> Iterator[str]:
    """The challenger's address, while it runs."""
    application = challenger_application(settings.name)
    take_down(application)  # of an attempt that was killed
    watch.note(f"starting the challenger {application}")
    try:
        brought = bring(
            settings,
            application=application,
            process=replace(process, replicas=1, autoscaling=None),
            at=at,
            prompt=prompt,
            watch=watch,
        )
        url = brought.endpoint.url
        watch.note(f"the challenger answers at {url}")
        yield url
    finally:
        take_down(application)


def _hold(
    model: str,
    *,
    mode: Mode,
    parameters: Parameters,
    application: str,
    url: str,
    watch: Watch,
    seconds_left: Callable[[], float],
) -> TrialResult:
    traffic = TrafficSettings(
        mode=mode,
        trial_id=uuid.uuid4().hex,
        model=model,
        challenger_url=url,
        percent=parameters.percent,
        session_header=parameters.session_header.lower(),
        first_byte_seconds=parameters.first_byte_seconds,
    )
    if isinstance(parameters, ShadowParameters):
        traffic = replace(
            traffic, queued_copies=parameters.queued_copies, concurrent_copies=parameters.concurrent_copies
        )
    evidence = Evidence()
    try:
        set_traffic(application, traffic, timeout_seconds=SWITCH_SECONDS)
        started = heard_at = time.monotonic()  # behind the wait for whoever changes the application
        while True:
            found = collect(application, trial_id=traffic.trial_id)
            now = time.monotonic()
            if found is not None:
                evidence, heard_at = found, now
            if now - heard_at > SILENT_SECONDS:
                raise ClusterError(
                    f"{mode} of {model!r}: no replica has said anything of it for {SILENT_SECONDS:g} s",
                    hint="the champion serves everything; see `pipeline deployments`",
                )
            # A stage that runs out of time loses its trial in time to clean up.
            elapsed = now - started if seconds_left() > 2 * SWITCH_SECONDS else parameters.window_seconds
            judgement = judge(evidence, rules=parameters.rules, elapsed_seconds=elapsed)
            if judgement.verdict is not Verdict.WAIT:
                return TrialResult(mode=mode, judgement=judgement, evidence=evidence, seconds=now - started)
            watch.on_progress(f"{mode}: {judgement.reason}, {now - started:.0f} s of {parameters.window_seconds:g}")
            time.sleep(JUDGE_SECONDS)
    finally:
        set_traffic(application, None, timeout_seconds=SWITCH_SECONDS)


def prove(
    context: StageContext[DeployServeParameters],
    settings: ReplicaSettings,
    *,
    application: str,
    process: ProcessSettings,
    at: Endpoint,
    watch: Watch,
) -> dict[str, float]:
    """Hold the trials that the flow asks for; their metrics. Empty where there is nothing to hold them against.

    Raises:
        GateError: a trial was lost; the champion serves.
        PipelineError: the challenger cannot be had; likewise.
    """
    parameters = context.parameters
    trials = planned(canary=parameters.canary, shadow=parameters.shadow)
    if not trials:
        return {}
    modes = " and ".join(mode for mode, _ in trials)
    running = running_applications().get(application)
    champion = None if running is None else running.config.model(settings.name)
    if running is None or champion is None or not running.num_running:
        watch.note(f"no {modes}: nothing serves as {settings.name!r} yet")
        return {}
    if champion.digest == settings.digest and same_executables(champion, settings):
        watch.note(f"no {modes}: this version serves already")
        return {}
    results = hold_trials(
        settings,
        application=application,
        process=process,
        at=at,
        trials=trials,
        prompt=parameters.smoke_prompt,
        watch=watch,
        seconds_left=context.seconds_left,
    )
    metrics: dict[str, float] = {}
    for result in results:
        metrics |= result.metrics
        if "store" in context.environment:
            event = _event(context, result, champion=champion, challenger=settings, application=application)
            append_event(open_store(context.environment["store"]), event)
    context.reporter.metrics(metrics)
    lost = results[-1]
    if lost.judgement.verdict is not Verdict.PROMOTE:
        raise GateError(
            f"{lost.mode} of {settings.name!r}: version {settings.version} was taken down: {lost.judgement.reason}",
            hint=f"version {champion.version} serves all requests, as before",
        )
    return metrics


def _event(
    context: StageContext[DeployServeParameters],
    result: TrialResult,
    *,
    champion: ReplicaSettings,
    challenger: ReplicaSettings,
    application: str,
) -> DeploymentEvent:
    """The champion serves before and after; what follows a trial that was won is an event of its own."""
    serving = VersionReference(version=champion.version, digest=champion.digest)
    tried = VersionReference(version=challenger.version, digest=challenger.digest)
    return DeploymentEvent(
        name=challenger.name,
        action=result.mode,
        when=time.time(),
        who=operator(),
        source=serving,
        target=serving,
        how="unchanged",
        seconds=round(result.seconds, 3),
        gates={gate.metric: str(gate) for gate in result.judgement.gates},
        reason=f"{result.judgement.verdict} of version {tried}: {result.judgement.reason}; "
        f"run {context.run_id} of flow {context.flow}",
        application=application,
        settings=recorded_settings(champion),
    )
