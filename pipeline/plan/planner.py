"""What a run would do with each stage, and why.

Owns the decision to reuse or run, and its reason in plain words. Pure: what it must know of the world comes in as
functions and values, time too. The one decision: a stage is reused only where its fingerprint is committed and the
commit holds; a stage whose inputs are not yet committed has no fingerprint, and the plan says so instead of guessing.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.artifacts.commit import Commit
from pipeline.errors import UsageError, nearest_name
from pipeline.plan.fingerprint import Fingerprint, fingerprint_of
from pipeline.plan.stage import ResolvedStage
from pipeline.spec.scalar import canonical_text

Lookup = Callable[[str], Commit | None]
"""Fingerprint to its commit."""
Sources = Callable[[ResolvedStage], Mapping[str, str]]
"""Stage to digests of what its kind reads from outside the flow."""
Verify = Callable[[ResolvedStage, Commit], str | None]
"""Why a commit no longer holds, or None."""

MAX_CHANGES_SHOWN = 3
MAX_VALUE_CHARACTERS = 40


class Action(StrEnum):
    """What a run does with a stage."""

    REUSE = "REUSE"
    RUN = "RUN"
    WAIT_FOR_INPUTS = "WAIT_FOR_INPUTS"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """One stage with what is to be done."""

    stage: ResolvedStage
    action: Action
    reason: str
    fingerprint: str | None = None
    """Hexadecimal; None where an input is not committed yet."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """What the fingerprint was made of."""
    commit: Commit | None = None
    """The committed result, where it is reused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every stage of a flow in an order in which they can run."""

    stages: tuple[PlannedStage, ...]

    def __getitem__(self, name: str) -> PlannedStage:
        for planned in self.stages:
            if planned.stage.name == name:
                return planned
        raise KeyError(name)

    @property
    def num_reused(self) -> int:
        """Stages that need not run."""
        return sum(planned.action is Action.REUSE for planned in self.stages)


def make_plan(
    stages: Sequence[ResolvedStage],
    *,
    lookup: Lookup,
    sources: Sources,
    verify: Verify,
    previous: Mapping[str, Mapping[str, Any]],
    force: AbstractSet[str],
    now: float,
) -> Plan:
    """Plan a whole flow on what is committed now.

    Args:
        stages: in order, as `pipeline.plan.graph.resolve` gives them.
        lookup: commit of a fingerprint.
        sources: digests of what a stage reads from outside.
        verify: why a commit no longer holds.
        previous: parts of each stage's last fingerprint in this flow; explains why a stage runs.
        force: stages that run whatever is committed.
        now: seconds since the epoch.

    Raises:
        UsageError: `force` names a stage that the flow does not have.
        ParameterError: a stage has no stable fingerprint.
    """
    names = [stage.name for stage in stages]
    for name in sorted(force - set(names)):
        nearest = nearest_name(name, names)
        raise UsageError(
            f"the flow has no stage {name!r} to force; its stages: {', '.join(names)}",
            hint=f"did you mean {nearest!r}?" if nearest else "",
        )
    commits: dict[str, Commit] = {}
    planned = []
    for stage in stages:
        one = plan_stage(
            stage,
            commits=commits,
            lookup=lookup,
            sources=sources,
            verify=verify,
            previous=previous,
            force=force,
            now=now,
        )
        planned.append(one)
        if one.action is Action.REUSE and one.commit is not None:
            commits[stage.name] = one.commit
    return Plan(stages=tuple(planned))


def plan_stage(
    stage: ResolvedStage,
    *,
    commits: Mapping[str, Commit],
    lookup: Lookup,
    sources: Sources,
    verify: Verify,
    previous: Mapping[str, Mapping[str, Any]],
    force: AbstractSet[str],
    now: float,
) -> PlannedStage:
    """Plan one stage; the arguments are those of `make_plan`, and `commits` holds the stages that are done.

    Raises:
        ParameterError: the stage has no stable fingerprint.
    """
    missing = [name for name in stage.needs if name not in commits]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        reason = f"fingerprint known when {_listed(missing)} {verb} done"
        reason = f"forced; {reason}" if stage.name in force else reason
        return PlannedStage(stage=stage, action=Action.WAIT_FOR_INPUTS, reason=reason)
    inputs = {
        name: commits[reference.stage].outputs[reference.output].digest for name, reference in stage.inputs.items()
    }
    fingerprint = fingerprint_of(stage, inputs=inputs, sources=sources(stage))
    if stage.name in force:
        return _run(stage, fingerprint=fingerprint, reason="forced")
    commit = lookup(fingerprint.value)
    if commit is None:
        return _run(stage, fingerprint=fingerprint, reason=why_it_runs(fingerprint.parts, previous.get(stage.name)))
    damage = verify(stage, commit)
    if damage is not None:
        return _run(stage, fingerprint=fingerprint, reason=f"committed artifact does not verify: {damage}")
    where = "" if commit.stage == stage.name else f" (stage {commit.stage} of flow {commit.flow})"
    return PlannedStage(
        stage=stage,
        action=Action.REUSE,
        reason=f"same fingerprint as run {commit.run_id}{where} ({age_in_words(now - commit.created_at)} ago)",
        fingerprint=fingerprint.value,
        parts=fingerprint.parts,
        commit=commit,
    )


def _run(stage: ResolvedStage, *, fingerprint: Fingerprint, reason: str) -> PlannedStage:
    return PlannedStage(
        stage=stage, action=Action.RUN, reason=reason, fingerprint=fingerprint.value, parts=fingerprint.parts
    )


def why_it_runs(parts: Mapping[str, Any], previous: Mapping[str, Any] | None) -> str:
    """What changed since the parts of an earlier fingerprint, in words."""
    if not previous:
        return "never run"
    if parts["kind"] != previous.get("kind"):
        return f"kind {previous.get('kind')} -> {parts['kind']}"
    if parts["version"] != previous.get("version"):
        return f"kind version {previous.get('version')} -> {parts['version']}"
    changes = [
        *_changed_values("parameter", before=previous.get("parameters", {}), after=parts["parameters"]),
        *_changed_contents("input", before=previous.get("inputs", {}), after=parts["inputs"]),
        *_changed_contents("content of", before=previous.get("files", {}), after=parts["files"]),
        *_changed_contents("content of", before=previous.get("sources", {}), after=parts["sources"]),
    ]
    if not changes:
        same = parts.get("format") == previous.get("format")
        return "its committed artifact is gone from the store" if same else "the form of fingerprints changed"
    more = len(changes) - MAX_CHANGES_SHOWN
    shown = "; ".join(changes[:MAX_CHANGES_SHOWN])
    return f"{shown}; and {more} more" if more > 0 else shown


def _changed_values(noun: str, *, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Changed values with their old and new value, nested ones by their dotted path."""
    old, new = _flat(before), _flat(after)
    return [
        f"{noun} {name}: {_shown(old, name)} -> {_shown(new, name)}"
        for name in dict.fromkeys([*new, *old])
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


def _changed_contents(noun: str, *, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    changes = []
    for name in dict.fromkeys([*after, *before]):
        if name not in before:
            changes.append(f"{noun} {name} added")
        elif name not in after:
            changes.append(f"{noun} {name} removed")
        elif before[name] != after[name]:
            changes.append(f"{noun} {name} changed")
    return changes


_ABSENT = object()


def _flat(values: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, path=f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = value
    return flat


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    value = values[name]
    if isinstance(value, str):
        text = repr(value)
    else:
        text = canonical_text(value) if isinstance(value, bool | int | float) else str(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def age_in_words(seconds: float) -> str:
    """`12 s`, `5 min`, `2 h`, `3 d`; whole units, rounded down."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
