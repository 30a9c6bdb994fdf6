"""From what the user wrote to stages in the order they can run.

Owns the checks that need the table of kinds (parameters, references, artifact types, gates), the graph and its order.
Pure but for one thing: it looks whether the files that a flow names exist. The one decision: the graph is what the
references say, and stages that are free to go either way keep their order of the file.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import Position, Problem, SpecError, nearest_name
from pipeline.plan.fallback import with_fallbacks
from pipeline.plan.inputs import accepted_types, source_paths
from pipeline.plan.stage import ResolvedStage, resources_of
from pipeline.spec.check import check
from pipeline.spec.flow import FlowSpec, StageSpec, WrittenReference
from pipeline.spec.load import parse_flow, read_flow
from pipeline.stages.parameters import Parameters
from pipeline.stages.protocol import Resources
from pipeline.stages.reference import OutputReference
from pipeline.stages.registry import KINDS, StageKind, outputs_of

__all__ = ["Flow", "ResolvedStage", "ancestors", "dependents", "levels", "open_flow", "open_flow_text", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A flow that was read and found right."""

    spec: FlowSpec
    stages: tuple[ResolvedStage, ...]
    """In an order in which they can run."""


def open_flow(path: Path, *, overrides: Sequence[str] = ()) -> Flow:
    """Read and resolve a flow file; what `pipeline validate` does.

    Raises:
        SpecError: with every problem of the file, of the overrides and of the stages against their kinds.
    """
    return _finish(*read_flow(path, overrides=overrides))


def open_flow_text(text: str, *, file: Path, overrides: Sequence[str] = ()) -> Flow:
    """Like `open_flow`, for a flow whose text was kept (a run that is taken up again).

    Raises:
        SpecError: as `open_flow`.
    """
    return _finish(*parse_flow(text, file=file, overrides=overrides))


def resolve(flow: FlowSpec) -> tuple[ResolvedStage, ...]:
    """Check every stage against its kind and order them; stable by file order.

    Raises:
        SpecError: with every problem found.
    """
    return _finish(flow, ()).stages


def levels(stages: Sequence[ResolvedStage]) -> tuple[tuple[str, ...], ...]:
    """Names of stages that could run at the same time, by their distance from the start; `stages` are in order."""
    depth: dict[str, int] = {}
    rows: list[list[str]] = []
    for stage in stages:
        depth[stage.name] = max((depth[name] + 1 for name in stage.needs), default=0)
        if depth[stage.name] == len(rows):
            rows.append([])
        rows[depth[stage.name]].append(stage.name)
    return tuple(tuple(row) for row in rows)


def dependents(stages: Sequence[ResolvedStage], name: str) -> tuple[str, ...]:
    """Names of all stages that need `name`, directly or not; `stages` are in order."""
    found = {name}
    for stage in stages:
        if found.intersection(stage.needs):
            found.add(stage.name)
    return tuple(stage.name for stage in stages if stage.name in found and stage.name != name)


def ancestors(stages: Sequence[ResolvedStage], name: str) -> tuple[str, ...]:
    """Names of all stages that `name` needs, directly or not; `stages` are in order."""
    needs = {stage.name: stage.needs for stage in stages}
    found, open_names = set(), [*needs[name]]
    while open_names:
        one = open_names.pop()
        if one not in found:
            found.add(one)
            open_names += needs[one]
    return tuple(stage.name for stage in stages if stage.name in found)


def _finish(flow: FlowSpec, problems: Sequence[Problem]) -> Flow:
    stages, found = with_fallbacks(flow, *_resolved(flow), resolve=_resolved)
    everything = [*problems, *found]
    if everything:
        raise SpecError(everything)
    return Flow(spec=flow, stages=stages)


def _resolved(flow: FlowSpec) -> tuple[tuple[ResolvedStage, ...], list[Problem]]:
    resolver = _Resolver(flow=flow)
    return resolver.run(), resolver.problems


@dataclass(kw_only=True, slots=True)
class _Resolver:
    flow: FlowSpec
    problems: list[Problem] = field(default_factory=list)
    kinds: dict[str, StageKind] = field(default_factory=dict)
    given: dict[str, Parameters] = field(default_factory=dict)
    """Parameters of the stages where they are right."""
    files: dict[str, dict[str, Path]] = field(default_factory=dict)
    """Source files of each stage by parameter name."""

    def _tell(self, code: str, found: str, *, path: str, position: Position, **more: Any) -> None:
        self.problems.append(Problem(position=position, path=path, code=code, found=found, **more))

    def run(self) -> tuple[ResolvedStage, ...]:
        """All stages in order; incomplete where there are problems."""
        for spec in self.flow.stages:
            self._parameters(spec)
        self.problems = [self._with_outputs(problem) for problem in self.problems]
        needs = {spec.name: self._needs(spec) for spec in self.flow.stages}
        stages = [self._stage(spec, needs=needs[spec.name]) for spec in self.flow.stages]
        ordered = _order(needs)
        self._cycles({name: set(needed) for name, needed in needs.items() if name not in ordered})
        by_name = {stage.name: stage for stage in stages if stage is not None}
        return tuple(by_name[name] for name in ordered if name in by_name)

    def _parameters(self, spec: StageSpec) -> None:
        kind = KINDS.get(spec.uses)
        if kind is None:
            if spec.uses:  # An absent or misshapen `uses` was told where the file was read.
                self._tell(
                    "unknown-kind",
                    f"there is no stage kind {spec.uses!r}",
                    path=f"stages.{spec.name}.uses",
                    position=spec.position("uses"),
                    allowed=tuple(KINDS),
                    nearest=nearest_name(spec.uses, tuple(KINDS)),
                )
            return
        self.kinds[spec.name] = kind
        checked = check(
            spec.with_,
            model=kind.parameters,
            path=f"stages.{spec.name}.with",
            params=self.flow.declarations,
            owner=kind.name,
        )
        self.problems.extend(checked.problems)
        if checked.value is not None:
            self.given[spec.name] = checked.value
        self.files[spec.name] = self._source_files(spec, model=kind.parameters, values=checked.read)

    def _with_outputs(self, problem: Problem) -> Problem:
        """Where a problem is about a parameter that takes an artifact, say which outputs of the flow fit."""
        _, name, key, below = (problem.path.split(".", 3) + [""] * 3)[:4]
        if key != "with" or name not in self.kinds:
            return problem
        wanted = accepted_types(self.kinds[name].parameters, below)
        fitting = self._fitting(wanted, but=name) if wanted is not None else ()
        return replace(problem, allowed=fitting) if fitting else problem

    def _outputs(self, name: str) -> Mapping[str, str] | None:
        """What a stage produces; None where its kind or its parameters are in error."""
        kind = self.kinds.get(name)
        if kind is None:
            return None
        if name in self.given:
            return outputs_of(kind, self.given[name])
        return kind.outputs or None

    def _needs(self, spec: StageSpec) -> tuple[str, ...]:
        """Names of the stages that a stage refers to; tells of references to nothing."""
        names = [stage.name for stage in self.flow.stages]
        needed: dict[str, None] = {}
        for reference in spec.references():
            path = f"stages.{spec.name}.{reference.path}"
            if reference.stage == spec.name:
                found = f"the stage {spec.name!r} refers to its own output"
                self._tell("self-reference", found, path=path, position=reference.position)
            elif reference.stage not in names:
                self._tell(
                    "unknown-stage",
                    f"the flow has no stage {reference.stage!r}",
                    path=path,
                    position=reference.position,
                    allowed=tuple(name for name in names if name != spec.name) or ("none",),
                    nearest=nearest_name(reference.stage, names),
                )
            else:
                needed[reference.stage] = None
                self._output(spec, reference=reference, path=path)
        return tuple(name for name in names if name in needed)

    def _output(self, spec: StageSpec, *, reference: WrittenReference, path: str) -> None:
        """Tell of an output that its stage does not produce, or that is of a type that does not fit."""
        outputs = self._outputs(reference.stage)
        if outputs is None:
            return
        if reference.output not in outputs:
            self._tell(
                "unknown-output",
                f"the stage {reference.stage!r} ({self.kinds[reference.stage].name}) has no output "
                f"{reference.output!r}",
                path=path,
                position=reference.position,
                allowed=tuple(outputs) or ("none",),
                nearest=nearest_name(reference.output, tuple(outputs)),
            )
            return
        kind = self.kinds.get(spec.name)
        wanted = accepted_types(kind.parameters, reference.path.removeprefix("with.")) if kind else None
        found_type = outputs[reference.output]
        if wanted is not None and found_type not in wanted:
            self._tell(
                "wrong-artifact",
                f"the output {reference.output!r} of {reference.stage!r} is a {found_type}, and this takes a "
                f"{' or '.join(wanted)}",
                path=path,
                position=reference.position,
                allowed=self._fitting(wanted, but=spec.name) or ("none in this flow",),
            )

    def _fitting(self, wanted: tuple[str, ...], *, but: str) -> tuple[str, ...]:
        return tuple(
            str(OutputReference(stage=stage.name, output=output))
            for stage in self.flow.stages
            if stage.name != but
            for output, output_type in (self._outputs(stage.name) or {}).items()
            if output_type in wanted
        )

    def _stage(self, spec: StageSpec, *, needs: tuple[str, ...]) -> ResolvedStage | None:
        kind = self.kinds.get(spec.name)
        if kind is None:
            return None
        self._gates(spec, kind=kind)
        resources = self._resources(spec, kind=kind)
        given = self.given.get(spec.name)
        if given is None:
            return None
        for problem in given.problems_within(spec.timeout_seconds):
            self._tell("wrong-order", problem, path=f"stages.{spec.name}", position=spec.position("timeout_seconds"))
        return ResolvedStage(
            name=spec.name,
            kind=kind,
            parameters=given,
            inputs=dict(_references(given)),
            needs=needs,
            outputs=outputs_of(kind, given),
            resources=resources,
            gates=spec.gates,
            retry=spec.retry,
            timeout_seconds=spec.timeout_seconds,
            description=spec.description,
            display={name: _plain(getattr(given, name)) for name in type(given).model_fields},
            source_files=self.files[spec.name],
        )

    def _gates(self, spec: StageSpec, *, kind: StageKind) -> None:
        for gate in spec.gates:
            if kind.default_metrics and gate.metric not in kind.default_metrics:
                self._tell(
                    "unknown-metric",
                    f"{kind.name} reports no metric {gate.metric!r}",
                    path=f"stages.{spec.name}.gates.{gate.metric}",
                    position=spec.position(f"gates.{gate.metric}"),
                    allowed=kind.default_metrics,
                    nearest=nearest_name(gate.metric, kind.default_metrics),
                )

    def _resources(self, spec: StageSpec, *, kind: StageKind) -> Resources:
        asked = spec.resources
        if asked.max_workers > 1 and not kind.gang:
            gangs = ", ".join(other.name for other in KINDS.values() if other.gang)
            self._tell(
                "wrong-value",
                f"{kind.name} runs in one process, {asked.max_workers} workers were asked for",
                path=f"stages.{spec.name}.resources.workers",
                position=spec.position("resources.workers"),
                allowed=("1",),
                hint=f"kinds with several workers: {gangs}",
            )
        if asked.labels and kind.delegates and not kind.gang:
            found = f"{kind.name} places what it starts itself, and knows no labels"
            where = spec.position("resources.labels")
            self._tell("wrong-value", found, path=f"stages.{spec.name}.resources.labels", position=where)
        return resources_of(asked, kind=kind)

    def _source_files(self, spec: StageSpec, *, model: type[Parameters], values: Mapping[str, Any]) -> dict[str, Path]:
        files = {}
        for name, text in source_paths(model, values):
            path = self.flow.project_root / text
            files[name] = path
            if path.is_file():
                continue
            found = (
                f"{text} is a directory" if path.is_dir() else f"there is no file {text} in {self.flow.project_root}"
            )
            beside = sorted(file.name for file in path.parent.iterdir()) if path.parent.is_dir() else []
            self._tell(
                "missing-file",
                found,
                path=f"stages.{spec.name}.with.{name}",
                position=spec.position(f"with.{name}"),
                nearest=nearest_name(path.name, beside),
            )
        return files

    def _cycles(self, needs: dict[str, set[str]]) -> None:
        """Tell of each cycle; `needs` holds the stages that could not be ordered."""
        while needs:
            cycle = _some_cycle(needs)
            first, second = cycle[0], cycle[1 % len(cycle)]
            spec = self.flow.stage(first)
            reference = next(each for each in spec.references() if each.stage == second)
            chain = ", ".join(f"{a} needs {b}" for a, b in zip(cycle, [*cycle[1:], first], strict=True))
            self._tell(
                "cycle",
                f"these stages wait for each other: {chain}",
                path=f"stages.{first}.{reference.path}",
                position=reference.position,
            )
            for name in cycle:
                del needs[name]
            while free := [name for name, needed in needs.items() if not needed & set(needs)]:
                for name in free:
                    del needs[name]


def _order(needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names in topological order, the first of the file first; names in or behind a cycle are left out."""
    place = {name: index for index, name in enumerate(needs)}
    names = list(needs)
    waiting = {name: len(needed) for name, needed in needs.items()}
    after: dict[str, list[str]] = {name: [] for name in needs}
    for name, needed in needs.items():
        for other in needed:
            after[other].append(name)
    ready = [place[name] for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, place[other])
    return ordered


def _some_cycle(needs: Mapping[str, set[str]]) -> list[str]:
    """A cycle, starting with its first stage of the file; every stage in `needs` needs another one in it."""
    seen: dict[str, int] = {}
    name = next(iter(needs))
    while name not in seen:
        seen[name] = len(seen)
        name = next(other for other in needs if other in needs[name])
    cycle = list(seen)[seen[name] :]
    start = min(range(len(cycle)), key=lambda index: list(needs).index(cycle[index]))
    return cycle[start:] + cycle[:start]


def _references(value: object, path: str = "") -> list[tuple[str, OutputReference]]:
    """Every reference inside parameters with its path."""
    if isinstance(value, OutputReference):
        return [(path, value)]
    if isinstance(value, BaseModel):
        items: list[tuple[str, object]] = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return []
    return [found for name, item in items for found in _references(item, f"{path}.{name}" if path else name)]


def _plain(value: object) -> Any:
    """A parameter as JSON."""
    if isinstance(value, OutputReference):
        return str(value)
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
