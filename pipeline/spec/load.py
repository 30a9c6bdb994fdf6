"""A flow file to a FlowSpec, or to everything that is wrong with it.

Owns finding, reading and checking the file against the grammar. Knows nothing of stage kinds: `with:` is kept as a
positioned tree. The one decision: reading goes on after a problem wherever it can, so that a user sees all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from pipeline.errors import Position, Problem, SpecError, nearest_name
from pipeline.settings import find_project_root
from pipeline.spec import grammar, tree
from pipeline.spec.check import check
from pipeline.spec.fallback import overlaid, why_no_hop
from pipeline.spec.flow import FallbackSpec, FlowSpec, StageSpec
from pipeline.spec.gate import CONDITION_FORM, Gate
from pipeline.spec.params import Param, ReadParams, read_params
from pipeline.spec.template import ALLOWED_FORMS, parse_template
from pipeline.spec.tree import Entry, ListNode, MapNode, ScalarNode

ModelT = TypeVar("ModelT", bound=BaseModel)


def load_flow(path: Path, *, overrides: Sequence[str] = ()) -> FlowSpec:
    """Read a flow file.

    Args:
        path: the file.
        overrides: NAME=VALUE texts of `-P`.

    Raises:
        SpecError: the file cannot be read, or something in it or in an override is wrong; carries every problem.
    """
    flow, problems = read_flow(path, overrides=overrides)
    if problems:
        raise SpecError(problems)
    return flow


def read_flow(path: Path, *, overrides: Sequence[str] = ()) -> tuple[FlowSpec, tuple[Problem, ...]]:
    """Read a flow file as far as it goes; for callers that have more problems to add.

    Raises:
        SpecError: there is nothing to go on with: no such file, no YAML, no mapping.
    """
    start = Position(file=str(path), line=1, column=1)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise _unreadable(path, position=start) from error
    except IsADirectoryError as error:
        flows = ", ".join(sorted(str(file) for file in path.glob("*.yaml"))[:5])
        hint = f"it holds {flows}" if flows else ""
        found = f"{path} is a directory, not a flow file"
        raise SpecError([Problem(position=start, path="", code="not-a-file", found=found, hint=hint)]) from error
    except (OSError, ValueError) as error:
        found = f"{path} cannot be read: {error}"
        raise SpecError([Problem(position=start, path="", code="unreadable-file", found=found)]) from error
    return parse_flow(tree.decode(data, file=str(path)), file=path, overrides=overrides)


def _unreadable(path: Path, *, position: Position) -> SpecError:
    directory = path.parent
    nearest = None
    if not directory.is_dir():
        found = f"there is no file {path}: no directory {directory}"
    else:
        found = f"there is no file {path}"
        nearest = nearest_name(path.name, sorted(file.name for file in directory.iterdir()))
    return SpecError([Problem(position=position, path="", code="missing-file", found=found, nearest=nearest)])


def parse_flow(text: str, *, file: Path, overrides: Sequence[str] = ()) -> tuple[FlowSpec, tuple[Problem, ...]]:
    """Read the text of a flow; `file` is where it is (or was), and need not exist.

    Raises:
        SpecError: the text is no YAML mapping.
    """
    root, problems = tree.parse(text, file=str(file))
    if root is not None and not isinstance(root, MapNode):
        found = "a flow is a mapping with the keys " + ", ".join(grammar.FLOW_KEYS)
        problems.append(Problem(position=root.position, path="", code="wrong-type", found=found))
        root = None
    if root is None:
        raise SpecError(problems)
    reader = _FlowReader(problems=problems)
    flow = reader.flow(root, text=text, file=file, overrides=tuple(overrides))
    return flow, tuple(reader.problems)


@dataclass(kw_only=True, slots=True)
class _FlowReader:
    problems: list[Problem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of parameters that something refers to."""

    def _tell(self, code: str, found: str, *, path: str, position: Position, **more: Any) -> None:
        self.problems.append(Problem(position=position, path=path, code=code, found=found, **more))

    def flow(self, root: MapNode, *, text: str, file: Path, overrides: tuple[str, ...]) -> FlowSpec:
        """The whole file."""
        self._only(root, allowed=tuple(grammar.FLOW_KEYS), path="", owner="a flow")
        read = read_params(root.get("params"), overrides=overrides, is_name=grammar.is_name)
        self.problems.extend(read.problems)
        name = self._flow_name(root)
        stages = self._stages(root, read=read)
        self._unused(root, read=read)
        return FlowSpec(
            name=name,
            description=self._text(root, "description", path="description"),
            file=file.resolve(),
            shown_file=str(file),
            project_root=find_project_root(file),
            text=text,
            declarations=read.params,
            stages=stages,
            overrides=overrides,
        )

    def _only(self, node: MapNode, *, allowed: tuple[str, ...], path: str, owner: str) -> None:
        """Tell of keys that do not exist."""
        for entry in node.entries:
            if entry.name not in allowed:
                below = f"{path}.{entry.name}" if path else entry.name
                hint = "the graph follows from references" if entry.name in ("needs", "depends_on", "after") else ""
                self._tell(
                    "unknown-key",
                    f"{owner} has no key {entry.name!r}",
                    path=below,
                    position=entry.position,
                    allowed=allowed,
                    nearest=nearest_name(entry.name, allowed),
                    hint=hint,
                )

    def _text(self, node: MapNode, key: str, *, path: str) -> str:
        """A plain text for people."""
        value = node.get(key)
        if value is None:
            return ""
        if isinstance(value, ScalarNode):
            return value.text
        self._tell("wrong-type", f"{key} is text", path=path, position=value.position)
        return ""

    def _flow_name(self, root: MapNode) -> str:
        node = root.get("flow")
        if node is None:
            found = "the required key 'flow' is missing (the name of the flow)"
            self._tell("missing-key", found, path="flow", position=root.position)
            return ""
        text = node.text if isinstance(node, ScalarNode) else ""
        if not grammar.is_name(text):
            found = f"{text!r} is no name for a flow" if text else "a flow needs a name"
            allowed = (grammar.NAME_FORM,)
            self._tell("wrong-name", found, path="flow", position=node.position, allowed=allowed)
        return text

    def _stages(self, root: MapNode, *, read: ReadParams) -> tuple[StageSpec, ...]:
        node = root.get("stages")
        if node is None:
            found = "the required key 'stages' is missing"
            self._tell("missing-key", found, path="stages", position=root.position)
            return ()
        if not isinstance(node, MapNode) or not node.entries:
            found = "stages is a mapping of names to stages, at least one"
            self._tell("wrong-type", found, path="stages", position=node.position)
            return ()
        stages = []
        for entry in node.entries:
            stage = self._stage(entry, read=read)
            if stage is not None:
                stages.append(stage)
        return tuple(stages)

    def _stage(self, entry: Entry, *, read: ReadParams) -> StageSpec | None:
        path = f"stages.{entry.name}"
        if not grammar.is_name(entry.name):
            found, form = f"{entry.name!r} is no name for a stage", (grammar.NAME_FORM,)
            self._tell("wrong-name", found, path=path, position=entry.position, allowed=form)
        node = entry.value
        if not isinstance(node, MapNode):
            found, allowed = "a stage is a mapping", tuple(grammar.STAGE_KEYS)
            self._tell("wrong-type", found, path=path, position=entry.position, allowed=allowed)
            return None
        self._only(node, allowed=tuple(grammar.STAGE_KEYS), path=path, owner="a stage")
        self._references(node, path=path, read=read)
        return replace(
            self._stage_of(node, entry=entry, path=path, read=read),
            fallback=self._fallback(node, entry=entry, path=path, read=read),
        )

    def _stage_of(self, node: MapNode, *, entry: Entry, path: str, read: ReadParams) -> StageSpec:
        """The stage of a mapping, its `fallback` apart."""
        resources = self._model(node, "resources", model=grammar.ResourcesSpec, path=path, params=read.params)
        retry = self._model(node, "retry", model=grammar.RetryPolicy, path=path, params=read.params)
        limits = self._model(node, "timeout_seconds", model=grammar.StageLimits, path=path, params=read.params)
        return StageSpec(
            name=entry.name,
            uses=self._uses(node, entry=entry, path=path),
            with_=self._with(node, entry=entry, path=path),
            resources=resources or grammar.ResourcesSpec(),
            gates=self._gates(node, path=path, params=read.params),
            retry=retry or grammar.RetryPolicy(),
            timeout_seconds=limits.timeout_seconds if limits else None,
            description=self._text(node, "description", path=f"{path}.description"),
            positions={below.removeprefix("."): position for below, position in tree.positions_of(node, path="")}
            | {"": entry.position},
        )

    def _fallback(self, node: MapNode, *, entry: Entry, path: str, read: ReadParams) -> tuple[FallbackSpec, ...]:
        """The hops, each with the stage as it is after it; what is wrong with the stage itself is told once."""
        written = node.get("fallback")
        if written is None:
            return ()
        if not isinstance(written, ListNode) or not written.items:
            found = "fallback is a list of hops, at least one"
            self._tell("wrong-type", found, path=f"{path}.fallback", position=written.position)
            return ()
        hops = []
        for index, item in enumerate(written.items):
            below = f"{path}.fallback.{index}"
            allowed = tuple(grammar.FALLBACK_KEYS)
            if not isinstance(item, MapNode):
                self._tell("wrong-type", "a hop is a mapping", path=below, position=item.position, allowed=allowed)
                continue
            self._only(item, allowed=allowed, path=below, owner="a hop of fallback")
            plain = tuple(one for one in item.entries if one.name in grammar.FallbackLimits.model_fields)
            limits = check(
                MapNode(entries=plain, position=item.position),
                model=grammar.FallbackLimits,
                path=below,
                params=read.params,
                owner="a hop of fallback",
            )
            self.problems.extend(limits.problems)
            wrong = why_no_hop(item, is_last=index == len(written.items) - 1)
            if wrong is not None:
                self._tell("wrong-value", wrong, path=below, position=item.position)
            known = list(self.problems)
            after = self._stage_of(overlaid(node, item), entry=entry, path=path, read=read)
            self.problems = known + [one for one in self.problems[len(known) :] if one not in known]
            said = limits.value or grammar.FallbackLimits()
            changed = {one.name: one.value for one in item.entries if isinstance(one.value, MapNode)}
            on = tuple(said.on)
            hops.append(FallbackSpec(on=on, keep=said.keep, stage=after, changed=changed, position=item.position))
        return tuple(hops)

    def _uses(self, node: MapNode, *, entry: Entry, path: str) -> str:
        uses = node.get("uses")
        if uses is None:
            found = "the required key 'uses' is missing (the stage kind)"
            self._tell("missing-key", found, path=f"{path}.uses", position=entry.position)
            return ""
        if not isinstance(uses, ScalarNode) or not uses.text or "${" in uses.text:
            found = "uses names one stage kind, as plain text"
            self._tell("wrong-type", found, path=f"{path}.uses", position=uses.position)
            return ""
        return uses.text

    def _with(self, node: MapNode, *, entry: Entry, path: str) -> MapNode:
        given = node.get("with")
        if isinstance(given, MapNode):
            return given
        if given is not None and not (isinstance(given, ScalarNode) and not given.text):
            found = "with is a mapping of the kind's parameters"
            self._tell("wrong-type", found, path=f"{path}.with", position=given.position)
        return MapNode(entries=(), position=given.position if given else entry.position)

    def _model(
        self, node: MapNode, key: str, *, model: type[ModelT], path: str, params: Mapping[str, Param]
    ) -> ModelT | None:
        """The value of a stage's key as a model of the grammar; None where it is absent or wrong."""
        value = node.get(key)
        if value is None:
            return None
        if key in model.model_fields:
            entry = next(entry for entry in node.entries if entry.name == key)
            value = MapNode(entries=(entry,), position=entry.position)
        else:
            path = f"{path}.{key}"
        if not isinstance(value, MapNode):
            allowed = tuple(model.model_fields)
            self._tell("wrong-type", f"{key} is a mapping", path=path, position=value.position, allowed=allowed)
            return None
        checked = check(value, model=model, path=path, params=params, owner=key)
        self.problems.extend(checked.problems)
        return checked.value

    def _gates(self, node: MapNode, *, path: str, params: Mapping[str, Param]) -> tuple[Gate, ...]:
        conditions = self._model(node, "gates", model=grammar.Conditions, path=path, params=params)
        written = node.get("gates")
        if conditions is None or not isinstance(written, MapNode):
            return ()
        gates = []
        for entry in written.entries:
            condition = conditions.gates[entry.name]
            gate = _gate(entry.name, condition)
            if gate is not None:
                gates.append(gate)
                continue
            self._tell(
                "wrong-gate",
                f"{condition!r} is no condition",
                path=f"{path}.gates.{entry.name}",
                position=entry.value.position,
                allowed=(CONDITION_FORM,),
            )
        return tuple(gates)

    def _references(self, node: MapNode, *, path: str, read: ReadParams) -> None:
        """Tell of references that are malformed, out of place or to unknown parameters; note the used ones."""
        for entry in node.entries:
            if entry.name in ("uses", "description"):
                continue
            for below, scalar in tree.walk_scalars(entry.value, path=f"{path}.{entry.name}"):
                self._template(scalar, path=below, read=read, outputs=entry.name in ("with", "fallback"))

    def _template(self, scalar: ScalarNode, *, path: str, read: ReadParams, outputs: bool) -> None:
        template = parse_template(scalar.text)
        for part in template.malformed:
            self._tell(
                "wrong-reference",
                f"{part.text} is no reference",
                path=path,
                position=scalar.position,
                allowed=ALLOWED_FORMS,
                nearest=part.nearest,
                hint="write $${ for a plain ${",
            )
        for reference in template.params:
            self.used.add(reference.name)
            if reference.name not in read.names:
                nearest = nearest_name(reference.name, read.names)
                self.used.add(nearest or "")  # a misspelt reference is told once, not as an unused parameter too
                self._tell(
                    "unknown-parameter",
                    f"the flow declares no parameter {reference.name!r}",
                    path=path,
                    position=scalar.position,
                    allowed=read.names or ("none",),
                    nearest=nearest,
                )
        if template.stages and not outputs:
            found = "outputs of stages can be referred to in with only"
            self._tell("unexpected-reference", found, path=path, position=scalar.position)

    def _unused(self, root: MapNode, *, read: ReadParams) -> None:
        params = root.get("params")
        if not isinstance(params, MapNode):
            return
        for entry in params.entries:
            if entry.name not in self.used:
                found = f"nothing refers to the parameter {entry.name!r}"
                hint = f"use it as ${{params.{entry.name}}} or remove it"
                self._tell("unused-parameter", found, path=f"params.{entry.name}", position=entry.position, hint=hint)


def _gate(metric: str, condition: str) -> Gate | None:
    """The gate, or None where the condition has another form or a limit that nothing can miss or meet."""
    try:
        gate = Gate.parse(metric, condition)
    except ValueError:
        return None
    return gate if math.isfinite(gate.limit) else None
