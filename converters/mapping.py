"""Strict accounting: every source tensor used, tied, ignored by name, or an error; every leaf filled, or an error.

Owns the plan of a conversion, made from headers alone, and its text when it fails. Knows nothing of files. The one
decision: all complaints are gathered and raised together, each naming the tensor, what was found, what was expected
and the nearest rule, because a wrong table is fixed in one reading and not one tensor a run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from converters.families.table import FamilyTable
from converters.operations import DTYPES, FLOAT_DTYPES, Cast, Operation, Shape
from converters.rules import Rule, fields, match, render
from converters.source import TensorHeader
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError, nearest_name

DtypePolicy = Literal["keep", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One application of a rule."""

    rule: Rule
    captures: Mapping[str, str]
    sources: tuple[str, ...]
    """Canonical names, in the order of the rule's sources."""
    targets: tuple[str, ...]
    """Leaf paths, in the order of the rule's targets."""
    casts: tuple[Cast, ...]
    """One a target; `before == after` where the dtype is kept."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is done, casts that change something included."""
        changed = dict.fromkeys(cast for cast in self.casts if cast.before != cast.after)
        return (*self.rule.operations, *changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingPlan:
    """A conversion that accounts for everything."""

    steps: tuple[Step, ...]
    tied: Mapping[str, str]
    """Canonical name of a present tensor to the one it must equal."""
    ignored: tuple[str, ...]
    carried: tuple[str, ...]
    """Canonical names of tensors that go back unchanged."""
    stored: Mapping[str, str]
    """Stored name by canonical name."""


@dataclass(frozen=True, slots=True)
class _Grouped:
    steps: list[tuple[Rule, dict[str, str]]]
    complaints: list[str]


def plan_mapping(
    headers: Mapping[str, TensorHeader],
    *,
    table: FamilyTable,
    targets: Mapping[str, Shape],
    dtype: DtypePolicy,
    target_dtypes: Mapping[str, str] | None = None,
) -> MappingPlan:
    """Account for every tensor of `headers` (by stored name) and every leaf of `targets` (shape by path).

    Args:
        headers: of the checkpoint.
        table: the family's table for this checkpoint's config.
        targets: the leaves that the Flax model has.
        dtype: what weights are cast to; other tensors keep their dtype.
        target_dtypes: the model's own dtype by leaf path: a weight fills a weight, a counter a counter.

    Raises:
        ConversionError: something does not fit; lists every complaint.
    """
    stored = canonical_names(headers, prefixes=table.prefixes, is_known=lambda name: _is_known(name, table))
    for tie in table.ties:
        if tie.tensor in stored and tie.same_as not in stored:  # saved under its other name
            stored[tie.same_as] = stored.pop(tie.tensor)
    by_name = {name: headers[stored_name] for name, stored_name in stored.items()}
    ignored = _matching(by_name, templates=table.ignored)
    carried = _matching(by_name, templates=table.carried)
    tied = {tie.tensor: tie.same_as for tie in table.ties if tie.tensor in by_name}
    complaints = _tie_complaints(tied, by_name)
    apart = {*ignored, *carried, *tied}
    weights = {name: header for name, header in by_name.items() if name not in apart}
    complaints += _dtype_complaints({name: header for name, header in by_name.items() if name not in ignored})
    found_by_name = {name: f"{header.shape} {header.dtype}" for name, header in weights.items()}
    grouped = _group(found_by_name, table=table)
    complaints += grouped.complaints
    steps: list[Step] = []
    for rule, captures in grouped.steps:
        step, found = _step(
            rule, captures, weights=weights, targets=targets, dtype=dtype, vocabulary=table.facts.get("vocab_size")
        )
        complaints += found + (_kind_complaints(step, target_dtypes or {}) if step is not None else [])
        if step is not None:
            steps.append(step)
    reached = {render(target, captures) for rule, captures in grouped.steps for target in rule.targets}
    complaints += _missing(sorted(set(targets) - reached), table=table, targets=targets, present=weights)
    if complaints:
        raise _error("the checkpoint does not fit the model", complaints)
    return MappingPlan(steps=tuple(steps), tied=tied, ignored=ignored, carried=carried, stored=stored)


def reverse_steps(
    found: Mapping[str, tuple[Shape, str]], *, table: FamilyTable, targets: Mapping[str, Shape]
) -> list[tuple[Rule, dict[str, str]]]:
    """The inverted rules that lead from the leaves back, with their captures.

    Args:
        found: shape and dtype of every leaf, by path.
        table: the family's table for this model's config.
        targets: the leaves the model has, with their shapes.

    Raises:
        ConversionError: a leaf is missing, unknown or has another shape; lists every complaint.
    """
    complaints = [
        f"{path}: expected shape {targets[path]}, found " + (f"{found[path][0]}" if path in found else "no leaf")
        for path in targets
        if path not in found or found[path][0] != targets[path]
    ]
    complaints += [f"{path}: the model has no such leaf" for path in found if path not in targets]
    inverted = FamilyTable(
        family=table.family, facts=table.facts, rules=tuple(rule.inverted() for rule in table.rules), hints=table.hints
    )
    grouped = _group({path: f"{shape} {dtype}" for path, (shape, dtype) in found.items()}, table=inverted)
    complaints += grouped.complaints
    if complaints:
        raise _error("the leaves do not fit the model", complaints)
    return grouped.steps


def _group(found_by_name: Mapping[str, str], *, table: FamilyTable) -> _Grouped:
    """Find the one rule of every name, and gather the names that one application of a rule takes together.

    Args:
        found_by_name: what each name holds, for the complaints.
        table: whose rules are tried.
    """
    steps: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Rule, dict[str, str]]] = {}
    complaints = []
    for name, found in found_by_name.items():
        hits = [
            (number, rule, captures)
            for number, rule in enumerate(table.rules)
            for template in rule.sources
            if (captures := match(template, name)) is not None
        ]
        if len(hits) == 1:
            number, rule, captures = hits[0]
            steps.setdefault((number, tuple(sorted(captures.items()))), (rule, captures))
        elif hits:
            complaints.append(f"{name}: several rules take it: " + "; ".join(str(rule) for _, rule, _ in hits))
        else:
            nearest = _nearest_rule(name, table)
            complaints.append(f"{name}: no rule takes it and it is not ignored by name; found {found}{nearest}")
    # An incomplete group fills no leaf, and the leaf's own complaint names the tensor that is lacking.
    complete = [
        (rule, captures)
        for rule, captures in steps.values()
        if all(render(source, captures) in found_by_name for source in rule.sources)
    ]
    return _Grouped(complete, complaints)


def _step(
    rule: Rule,
    captures: Mapping[str, str],
    *,
    weights: Mapping[str, TensorHeader],
    targets: Mapping[str, Shape],
    dtype: DtypePolicy,
    vocabulary: int | None,
) -> tuple[Step | None, list[str]]:
    """One application of `rule`, checked by shape and dtype."""
    sources = tuple(render(source, captures) for source in rule.sources)
    paths = tuple(render(target, captures) for target in rule.targets)
    shown = ", ".join(f"{name} {weights[name].shape} {weights[name].dtype}" for name in sources)
    complaints = []
    dtypes = sorted({weights[name].dtype for name in sources})
    if len(dtypes) > 1:
        complaints.append(f"{shown}: tensors that are joined need one dtype")
    complaints += [
        f"{shown}: would fill {path}, which the model built from config.json does not have (rule {rule})"
        for path in paths
        if path not in targets
    ]
    try:
        shapes = rule.shapes([weights[name].shape for name in sources])
    except ValueError as error:
        return None, [*complaints, f"{shown}: {error} (rule {rule})"]
    complaints += [
        f"{shown}: gives {path} the shape {shape}, expected {targets[path]} (rule {rule})"
        + _shape_hint(shape, targets[path], vocabulary=vocabulary)
        for path, shape in zip(paths, shapes, strict=True)
        if path in targets and targets[path] != shape
    ]
    if complaints:
        return None, complaints
    cast = Cast(before=dtypes[0], after=dtypes[0] if dtype == "keep" or dtypes[0] not in FLOAT_DTYPES else dtype)
    return Step(rule=rule, captures=captures, sources=sources, targets=paths, casts=(cast,) * len(paths)), []


def _shape_hint(found: Shape, expected: Shape, *, vocabulary: int | None) -> str:
    """What a wrong shape looks like, where it looks like something known."""
    if len(found) > 1 and found[::-1] == expected:
        return "; it has the transposed shape: it was stored with its axes the other way round"
    differing = [axis for axis, (ours, theirs) in enumerate(zip(found, expected, strict=False)) if ours != theirs]
    if len(found) == len(expected) and len(differing) == 1 and expected[differing[0]] == vocabulary:
        held = found[differing[0]]
        if held > vocabulary:
            return (
                f"; the checkpoint's vocabulary was padded by {held - vocabulary}: set vocab_size to {held} in "
                "config.json, which keeps every row, or cut the rows off in the checkpoint"
            )
        return f"; the checkpoint's vocabulary is shorter: set vocab_size to {held} in config.json if that is right"
    return ""


def _kind_complaints(step: Step, target_dtypes: Mapping[str, str]) -> list[str]:
    return [
        f"{', '.join(step.sources)}: gives {path} numbers of dtype {cast.after}, expected {target_dtypes[path]}"
        for path, cast in zip(step.targets, step.casts, strict=True)
        if path in target_dtypes and _is_weight(cast.after) != _is_weight(target_dtypes[path])
    ]


def _is_weight(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _missing(
    paths: Sequence[str], *, table: FamilyTable, targets: Mapping[str, Shape], present: Mapping[str, TensorHeader]
) -> list[str]:
    """A complaint for each leaf that nothing fills, with the tensor that would have."""
    complaints = []
    for path in paths:
        text = f"{path}: nothing fills it (shape {targets[path]})"
        for rule in table.rules:
            found = next((c for target in rule.targets if (c := match(target, path)) is not None), None)
            if found is not None:
                wanted = [name for name in (render(source, found) for source in rule.sources) if name not in present]
                text += f"; the checkpoint lacks {', '.join(wanted)} (rule {rule})"
                break
        else:
            text += "; no rule of the family leads to it"
        complaints.append(text + _hint(path, table))
    return complaints


def _is_known(name: str, table: FamilyTable) -> bool:
    rules = (template for rule in table.rules for template in rule.sources)
    ties = (tie.tensor for tie in table.ties)
    return any(match(template, name) is not None for template in (*rules, *ties, *table.ignored, *table.carried))


def _matching(names: Iterable[str], *, templates: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if any(match(template, name) is not None for template in templates))


def _dtype_complaints(headers: Mapping[str, TensorHeader]) -> list[str]:
    return [
        f"{name}: dtype {header.dtype} is none this converter reads; allowed: {', '.join(DTYPES)}"
        for name, header in headers.items()
        if header.dtype not in DTYPES
    ]


def _tie_complaints(tied: Mapping[str, str], by_name: Mapping[str, TensorHeader]) -> list[str]:
    complaints = []
    for name, same_as in tied.items():
        here, there = by_name[name], by_name.get(same_as)
        if there is not None and (here.shape, here.dtype) != (there.shape, there.dtype):
            complaints.append(
                f"{name}: config.json ties it to {same_as}, but it is {here.shape} {here.dtype} "
                f"and the other {there.shape} {there.dtype}"
            )
    return complaints


def _nearest_rule(name: str, table: FamilyTable) -> str:
    plain = re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)
    rule_by_plain = {
        render(source, dict.fromkeys(fields(source), "#")): rule for rule in table.rules for source in rule.sources
    }
    nearest = nearest_name(plain, list(rule_by_plain))
    return (f"; nearest rule: {rule_by_plain[nearest]}" if nearest else "") + _hint(name, table)


def _hint(name: str, table: FamilyTable) -> str:
    return "".join(f"; {text}" for template, text in table.hints.items() if match(template, name) is not None)


def _error(what: str, complaints: Sequence[str]) -> ConversionError:
    noun = "complaint" if len(complaints) == 1 else "complaints"
    lines = "\n".join(f"  {complaint}" for complaint in sorted(complaints))
    return ConversionError(f"{what}: {len(complaints)} {noun}\n{lines}")
