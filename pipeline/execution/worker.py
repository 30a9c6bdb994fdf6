"""One stage attempt, from request to outcome, inside whatever process was made for it.

Owns the process boundary: the stage's code is loaded here, its context made, its outputs hashed and published, and
every exception turned into a classified failure. Knows nothing of Ray. The one decision: this is the only broad
`except` of the execution layer.
"""

import importlib
import sys
import traceback
from pathlib import Path

from pipeline.artifacts.commit import describe_outputs
from pipeline.artifacts.store import Store, open_store
from pipeline.errors import FailureClass, ParameterError, PipelineError
from pipeline.execution.backend import Failure, InputRequest, WorkOutcome, WorkRequest
from pipeline.execution.framework_guard import check_frameworks
from pipeline.stages.protocol import InputArtifact, ModelRegistry, Reporter, StageContext, StageFunction, StageResult


def execute(
    request: WorkRequest, *, reporter: Reporter, registry: ModelRegistry | None = None, is_own_process: bool
) -> WorkOutcome:
    """Run one attempt to its end. Never raises; an interrupt of the process does pass.

    Args:
        request: what to run.
        reporter: where the stage says what happens.
        registry: for stages that run on the driver.
        is_own_process: True where this process was made for the attempt, and may hold its framework only.
    """
    try:
        return _execute(request, reporter=reporter, registry=registry, is_own_process=is_own_process)
    except Exception as error:  # the boundary: whatever a stage raises becomes an outcome
        return WorkOutcome(failure=describe_failure(error))


def describe_failure(error: BaseException) -> Failure:
    """Classify an exception: a `PipelineError` knows its class, memory is infrastructure, the rest is the user's."""
    if isinstance(error, PipelineError):
        return Failure(
            failure_class=error.failure_class,
            error=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
    failure_class = FailureClass.INFRA if isinstance(error, MemoryError) else FailureClass.USER
    return Failure(
        failure_class=failure_class,
        error=type(error).__name__,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def resolve(dotted: str, *, project_root: str) -> StageFunction:
    """Load `module:function`, looking into the project first.

    Raises:
        ParameterError: there is no such module or function.
    """
    if project_root not in sys.path:
        sys.path.insert(0, project_root)
    module_name, _, name = dotted.partition(":")
    try:
        function: StageFunction = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"{dotted}: no module {error.name!r}", hint=f"looked into {project_root} and sys.path"
        ) from error
    except AttributeError as error:
        raise ParameterError(f"{dotted}: module {module_name!r} has no {name!r}") from error
    return function


def _execute(
    request: WorkRequest, *, reporter: Reporter, registry: ModelRegistry | None, is_own_process: bool
) -> WorkOutcome:
    store = open_store(request.store_url)
    if is_own_process:
        check_frameworks(request.framework, when="before")
    function = resolve(request.run, project_root=request.project_root)
    output_root = store.attempt_directory(request.attempt_key)
    context = _make_context(request, store=store, output_root=output_root, reporter=reporter, registry=registry)
    result = function(context)
    if not isinstance(result, StageResult):
        raise ParameterError(f"{request.run} returned {type(result).__name__}; a stage returns a StageResult")
    if is_own_process:
        check_frameworks(request.framework, when="after")
    outputs = describe_outputs(output_root, request.output_types)
    store.publish(output_root, request.attempt_key)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    return WorkOutcome(outputs=outputs, metrics=metrics, facts=dict(result.facts))


def _make_context(
    request: WorkRequest, *, store: Store, output_root: Path, reporter: Reporter, registry: ModelRegistry | None
) -> StageContext[object]:
    return StageContext(
        run_id=request.run_id,
        flow=request.flow,
        stage=request.stage,
        attempt=request.attempt,
        fingerprint=request.fingerprint,
        parameters=request.parameters,
        inputs={name: _make_input(value, store=store) for name, value in request.inputs.items()},
        output_root=output_root,
        workspace=store.workspace(request.workspace_key),
        project_root=Path(request.project_root),
        resources=request.resources,
        reporter=reporter,
        deadline=request.deadline,
        ephemeral=request.ephemeral,
        registry=registry,
        environment=request.environment,
    )


def _make_input(value: InputRequest, *, store: Store) -> InputArtifact:
    return InputArtifact(
        stage=value.stage,
        output=value.output,
        path=store.local_path(value.key),
        fingerprint=value.fingerprint,
        digest=value.digest,
        run_id=value.run_id,
        metrics=value.metrics,
        gates=value.gates,
    )
