"""The parameters of a flow: `params:` and `-P NAME=VALUE`.

Owns declarations, defaults, overrides, ranges and choices. Knows nothing of stages. The one decision: a parameter has
one declared type, and both its default and an override on the command line are read by that type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.errors import Position, Problem, nearest_name
from pipeline.spec.scalar import CONVERTERS, TYPE_WORDS, Scalar, canonical_text, core_value, is_null
from pipeline.spec.template import parse_template
from pipeline.spec.tree import Entry, ListNode, MapNode, Node, ScalarNode

Declared = Literal["int", "float", "bool", "str", "path"]
TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "path": str}
KEYS: Mapping[str, str] = {
    "type": "int, float, bool, str or path",
    "default": "The value where -P gives none; a parameter without a default must be given.",
    "minimum": "Smallest value, for int and float.",
    "maximum": "Largest value, for int and float.",
    "choices": "The only values allowed.",
    "description": "For people.",
}
OVERRIDE_FILE = "-P"
"""`Position.file` of an override; the line is its number on the command line, the column a place in NAME=VALUE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter with its value."""

    name: str
    declared: str
    """The declared type's name: int, float, bool, str or path."""
    value: Scalar
    position: Position
    description: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Scalar, ...] = ()
    overridden: bool = False

    @property
    def type(self) -> type:
        """The Python type of `value`."""
        return TYPES[self.declared]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declaration:
    """A parameter before it has a value."""

    name: str
    declared: str
    position: Position
    default: Scalar | None
    default_position: Position
    description: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Scalar, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadParams:
    """What `read_params` found. `names` holds every declared name, also of those whose value is in error."""

    params: Mapping[str, Param]
    names: tuple[str, ...]
    problems: tuple[Problem, ...]


def read_params(tree: Node | None, *, overrides: Sequence[str], is_name: Any) -> ReadParams:
    """Read `params:` and apply `-P` overrides.

    Args:
        tree: the value of `params:`, or None where the flow has none.
        overrides: NAME=VALUE texts in the order of the command line.
        is_name: predicate for a well-formed name.
    """
    problems: list[Problem] = []
    declarations: dict[str, _Declaration] = {}
    names: tuple[str, ...] = ()
    if isinstance(tree, MapNode):
        names = tree.names
        for entry in tree.entries:
            declaration = _declaration(entry, problems=problems, is_name=is_name)
            if declaration is not None:
                declarations[entry.name] = declaration
    elif tree is not None and not (isinstance(tree, ScalarNode) and is_null(tree.text)):
        found = "params is a mapping of names to values"
        problems.append(Problem(position=tree.position, path="params", code="wrong-type", found=found))
    given = _overrides(overrides, declarations=declarations, names=names, problems=problems)
    params: dict[str, Param] = {}
    for declaration in declarations.values():
        param = _settle(declaration, given=given, problems=problems)
        if param is not None:
            params[param.name] = param
    return ReadParams(params=params, names=names, problems=tuple(problems))


def _declaration(entry: Entry, *, problems: list[Problem], is_name: Any) -> _Declaration | None:
    path = f"params.{entry.name}"
    if not is_name(entry.name):
        found = f"{entry.name!r} is no name for a parameter"
        allowed = ("a letter, then letters, digits, _ and -",)
        problems.append(Problem(position=entry.position, path=path, code="wrong-name", found=found, allowed=allowed))
    match entry.value:
        case MapNode() as node:
            return _long_form(entry, node=node, path=path, problems=problems)
        case ListNode() as node:
            found = "a parameter is one value, not a list"
            problems.append(Problem(position=node.position, path=path, code="wrong-type", found=found))
            return None
        case ScalarNode() as node:
            value = core_value(node.text) if node.plain else _literal(node, path=path, problems=problems)
            if value is None:
                found, hint = "the parameter has no value", "write {type: int} for one that -P must give"
                problems.append(Problem(position=node.position, path=path, code="wrong-type", found=found, hint=hint))
                return None
            if isinstance(value, str) and node.plain:
                value = _literal(node, path=path, problems=problems)
                if value is None:
                    return None
            return _Declaration(
                name=entry.name,
                declared=type(value).__name__,
                position=entry.position,
                default=value,
                default_position=node.position,
            )


def _literal(node: ScalarNode, *, path: str, problems: list[Problem]) -> str | None:
    """Text that must hold no reference."""
    template = parse_template(node.text)
    if template.is_literal:
        return "".join(str(part) for part in template.parts)
    found, hint = "a parameter cannot refer to anything", "write $${ for a plain ${"
    problems.append(Problem(position=node.position, path=path, code="unexpected-reference", found=found, hint=hint))
    return None


def _long_form(entry: Entry, *, node: MapNode, path: str, problems: list[Problem]) -> _Declaration | None:
    before = len(problems)
    problems.extend(
        Problem(
            position=key.position,
            path=f"{path}.{key.name}",
            code="unknown-key",
            found=f"a parameter has no key {key.name!r}",
            allowed=tuple(KEYS),
            nearest=nearest_name(key.name, tuple(KEYS)),
        )
        for key in node.entries
        if key.name not in KEYS
    )
    declared = _declared_type(entry, node=node, path=path, problems=problems)
    if declared is None:
        return None
    values = _Values(declared=declared, path=path, problems=problems)
    default_node = node.get("default")
    declaration = _Declaration(
        name=entry.name,
        declared=declared,
        position=entry.position,
        default=values.one(node, "default"),
        default_position=default_node.position if default_node else entry.position,
        description=values.text(node, "description"),
        minimum=values.bound(node, "minimum"),
        maximum=values.bound(node, "maximum"),
        choices=values.several(node, "choices"),
    )
    low, high = declaration.minimum, declaration.maximum
    if low is not None and high is not None and low > high:
        found = f"the minimum {low} is above the maximum {high}"
        problems.append(Problem(position=entry.position, path=path, code="wrong-value", found=found))
    return declaration if len(problems) == before else None


def _declared_type(entry: Entry, *, node: MapNode, path: str, problems: list[Problem]) -> str | None:
    given = node.get("type")
    if given is None:
        found = "the required key 'type' is missing"
        problems.append(
            Problem(position=entry.position, path=f"{path}.type", code="missing-key", found=found, allowed=tuple(TYPES))
        )
        return None
    text = given.text if isinstance(given, ScalarNode) else ""
    if text in TYPES:
        return text
    found = f"{text!r} is no type of a parameter" if text else "the type is one word"
    problems.append(
        Problem(
            position=given.position,
            path=f"{path}.type",
            code="wrong-value",
            found=found,
            allowed=tuple(TYPES),
            nearest=nearest_name(text, tuple(TYPES)),
        )
    )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Values:
    """Reads the values of one long form by its type."""

    declared: str
    path: str
    problems: list[Problem]

    def _tell(self, node: Node, *, key: str, found: str, hint: str = "") -> None:
        self.problems.append(
            Problem(
                position=node.position,
                path=f"{self.path}.{key}",
                code="wrong-type",
                found=found,
                allowed=(TYPE_WORDS[TYPES[self.declared]],),
                hint=hint,
            )
        )

    def _convert(self, node: Node, *, key: str) -> Scalar | None:
        wanted = TYPES[self.declared]
        if not isinstance(node, ScalarNode):
            self._tell(node, key=key, found="found a list or a mapping")
            return None
        if wanted is str:
            if node.plain and is_null(node.text):
                self._tell(node, key=key, found="found nothing", hint="quote it to make it text")
                return None
            text = _literal(node, path=f"{self.path}.{key}", problems=self.problems)
            if text is not None and self.declared == "path" and not text:
                self._tell(node, key=key, found="a path is not empty")
            return text
        if not node.plain:
            self._tell(node, key=key, found=f"found the text {node.text!r}", hint="quotes make it text; remove them")
            return None
        try:
            return CONVERTERS[wanted](node.text)
        except ValueError as error:
            self._tell(node, key=key, found=str(error) if node.text else "found nothing")
            return None

    def one(self, node: MapNode, key: str) -> Scalar | None:
        """A value of the declared type."""
        given = node.get(key)
        return None if given is None else self._convert(given, key=key)

    def several(self, node: MapNode, key: str) -> tuple[Scalar, ...]:
        """A list of values of the declared type."""
        given = node.get(key)
        if given is None:
            return ()
        if not isinstance(given, ListNode) or not given.items:
            self._tell(given, key=key, found=f"{key} is a list of values")
            return ()
        values = [self._convert(item, key=f"{key}.{index}") for index, item in enumerate(given.items)]
        return tuple(value for value in values if value is not None)

    def bound(self, node: MapNode, key: str) -> float | None:
        """A bound of a number."""
        given = node.get(key)
        if given is None:
            return None
        if self.declared not in ("int", "float"):
            self._tell(given, key=key, found=f"{key} has no meaning for {self.declared}")
            return None
        value = self._convert(given, key=key)
        return value if isinstance(value, int | float) else None

    def text(self, node: MapNode, key: str) -> str:
        """Text for people."""
        given = node.get(key)
        if given is None or isinstance(given, ScalarNode):
            return given.text if given else ""
        self._tell(given, key=key, found=f"{key} is text")
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Override:
    text: str
    position: Position


def _overrides(
    overrides: Sequence[str],
    *,
    declarations: Mapping[str, _Declaration],
    names: tuple[str, ...],
    problems: list[Problem],
) -> dict[str, _Override]:
    given: dict[str, _Override] = {}
    for number, override in enumerate(overrides, start=1):
        name, equals, text = override.partition("=")
        position = Position(file=OVERRIDE_FILE, line=number, column=1)
        path = f"params.{name}"
        if not equals or not name:
            found, hint = f"{override!r} is not NAME=VALUE", "for example -P steps=200"
            problems.append(Problem(position=position, path="params", code="wrong-override", found=found, hint=hint))
        elif name not in names:
            problems.append(
                Problem(
                    position=position,
                    path=path,
                    code="unknown-parameter",
                    found=f"the flow declares no parameter {name!r}",
                    allowed=names or ("none",),
                    nearest=nearest_name(name, names),
                )
            )
        elif name in given:
            found = f"the parameter {name!r} is given twice"
            problems.append(Problem(position=position, path=path, code="wrong-override", found=found))
        else:
            given[name] = _Override(text=text, position=replace(position, column=len(name) + 2))
    return given


def _settle(declaration: _Declaration, *, given: Mapping[str, _Override], problems: list[Problem]) -> Param | None:
    """Give a parameter its value and hold it against range and choices."""
    path = f"params.{declaration.name}"
    override = given.get(declaration.name)
    position = override.position if override else declaration.default_position
    wanted = TYPES[declaration.declared]
    value = declaration.default
    if override is not None:
        try:
            value = CONVERTERS[wanted](override.text)
            if declaration.declared == "path" and not value:
                raise ValueError("a path is not empty")
        except ValueError as error:
            words = (TYPE_WORDS[wanted],)
            problems.append(
                Problem(position=position, path=path, code="wrong-override", found=str(error), allowed=words)
            )
            return None
    if value is None:
        found, hint = f"the parameter {declaration.name!r} has no default", f"give -P {declaration.name}=VALUE"
        problems.append(Problem(position=position, path=path, code="missing-parameter", found=found, hint=hint))
        return None
    complaint, allowed = _complaint(declaration, value=value)
    if complaint:
        problems.append(Problem(position=position, path=path, code="out-of-range", found=complaint, allowed=allowed))
        return None
    return Param(
        name=declaration.name,
        declared=declaration.declared,
        value=value,
        position=declaration.position,
        description=declaration.description,
        minimum=declaration.minimum,
        maximum=declaration.maximum,
        choices=declaration.choices,
        overridden=override is not None,
    )


def _complaint(declaration: _Declaration, *, value: Scalar) -> tuple[str, tuple[str, ...]]:
    allowed: list[str] = []
    bad = False
    if isinstance(value, int | float):
        if declaration.minimum is not None:
            allowed.append(f">= {declaration.minimum}")
            bad = bad or value < declaration.minimum
        if declaration.maximum is not None:
            allowed.append(f"<= {declaration.maximum}")
            bad = bad or value > declaration.maximum
    if declaration.choices and value not in declaration.choices:
        allowed = [canonical_text(choice) for choice in declaration.choices]
        bad = True
    return (f"{canonical_text(value)} is out of range", tuple(allowed)) if bad else ("", ())
