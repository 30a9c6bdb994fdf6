"""The fallback chain of each stage, checked like the stages themselves.

Owns what a hop may change. Pure. The one decision: every hop is resolved as a flow of its own in which the stage is
already changed, so a hop is refused for the same reasons and in the same words as a stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.errors import FailureClass, Problem
from pipeline.plan.stage import Hop, ResolvedStage
from pipeline.spec.flow import FallbackSpec, FlowSpec, StageSpec

KEEPERS = ("deploy.serve", "register.model")
"""Kinds with something that stays when they fail."""

Resolve = Callable[[FlowSpec], tuple[Sequence[ResolvedStage], Sequence[Problem]]]


def with_fallbacks(
    flow: FlowSpec, stages: Sequence[ResolvedStage], problems: Sequence[Problem], *, resolve: Resolve
) -> tuple[tuple[ResolvedStage, ...], list[Problem]]:
    """The stages with their hops, and every problem, each once.

    Args:
        flow: as written.
        stages: resolved without their fallbacks.
        problems: of the flow without its fallbacks.
        resolve: a flow into its stages and problems.
    """
    everything = list(problems)
    made = []
    for stage in stages:
        hops = []
        for index, spec in enumerate(flow.stage(stage.name).fallback):
            hop, found = _hop(flow, stage, spec, index=index, resolve=resolve)
            everything += [problem for problem in found if problem not in everything]
            if hop is not None:
                hops.append(hop)
        made.append(replace(stage, fallback=tuple(hops)))
    return tuple(made), everything


def _hop(
    flow: FlowSpec, stage: ResolvedStage, spec: FallbackSpec, *, index: int, resolve: Resolve
) -> tuple[Hop | None, list[Problem]]:
    path = f"stages.{stage.name}.fallback.{index}"
    on = tuple(FailureClass(name) for name in spec.on)
    if spec.keep is not None:
        if stage.kind.name in KEEPERS:
            return Hop(on=on, stage=None), []
        found = f"{stage.kind.name} has no champion to keep"
        problem = Problem(position=spec.position, path=path, code="wrong-value", found=found, allowed=KEEPERS)
        return None, [problem]
    changed = replace(flow, stages=tuple(_changed(one, stage.name, spec) for one in flow.stages))
    stages, problems = resolve(changed)
    after = next((one for one in stages if one.name == stage.name), None)
    if after is None or problems:
        return None, list(problems)
    wrong = _why_another(stage, after)
    if wrong:
        return None, [Problem(position=spec.position, path=path, code="wrong-value", found=wrong)]
    return Hop(on=on, stage=after, changes=_changes(spec, after, before=stage)), []


def _changed(one: StageSpec, name: str, spec: FallbackSpec) -> StageSpec:
    return spec.stage if one.name == name else one


def _why_another(before: ResolvedStage, after: ResolvedStage) -> str:
    """A hop may not move the stage in the graph: what runs before and after it is already decided."""
    more = [name for name in after.needs if name not in before.needs]
    if more:
        return f"a hop may not need stages that the stage does not need: {', '.join(more)}"
    if after.outputs != before.outputs:
        return f"after this hop the stage would produce {', '.join(after.outputs)}, not {', '.join(before.outputs)}"
    return ""


def _changes(spec: FallbackSpec, after: ResolvedStage, *, before: ResolvedStage) -> Mapping[str, Mapping[str, Any]]:
    given = after.resources
    workers: Any = given.workers if given.min_workers is None else {"min": given.min_workers, "max": given.workers}
    memory = str(given.memory_bytes)
    labels = dict(given.labels)
    resources = {"workers": workers, "cpus": given.cpus, "gpus": given.gpus, "memory": memory, "labels": labels}
    found: dict[str, Mapping[str, Any]] = {}
    if "with" in spec.changed:
        found["with"] = {entry.name: after.display[entry.name] for entry in spec.changed["with"].entries}
    if "resources" in spec.changed:
        found["resources"] = {entry.name: resources[entry.name] for entry in spec.changed["resources"].entries}
    if after.timeout_seconds != before.timeout_seconds:
        found["limits"] = {"timeout_seconds": after.timeout_seconds}
    return found
