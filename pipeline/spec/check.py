"""A positioned tree against a pydantic model: an instance, or every problem with its exact place.

Owns the conversion of source text by declared type, the substitution of `${params.x}`, and the wording of what does
not fit. Knows nothing of flows, stages or kinds. The one decision: the model's annotations are walked here, before
pydantic sees a value, so that `007` stays text in a text field, `1e-5` is a number in a number field, and `yes` is
never a boolean; pydantic then judges ranges, patterns and what fields say of each other.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.errors import Position, Problem, nearest_name
from pipeline.spec.params import Param
from pipeline.spec.scalar import CONVERTERS, TYPE_WORDS, Scalar, canonical_text, core_value, is_null
from pipeline.spec.template import ParamReference, StageReference, Template, parse_template
from pipeline.spec.tree import ListNode, MapNode, Node, ScalarNode

ModelT = TypeVar("ModelT", bound=BaseModel)


class _Bad:
    """Stands for a value whose problem is already told."""


_BAD: Final = _Bad()
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked(Generic[ModelT]):
    """The outcome: `value` is None exactly when `problems` is not empty or a parameter it needs is in error itself."""

    value: ModelT | None
    problems: tuple[Problem, ...]
    read: Mapping[str, Any]
    """The top-level keys that could be read by their type, also where others could not."""


def check(
    tree: MapNode, *, model: type[ModelT], path: str, params: Mapping[str, Param], owner: str = ""
) -> Checked[ModelT]:
    """Make a model instance from a mapping of the flow.

    Args:
        tree: the mapping.
        model: what it must be; nested models, lists, dicts, literals, unions and None are understood.
        path: dotted path of the mapping, for messages.
        params: the flow's parameters. A name that is not in it was reported where parameters are read.
        owner: whose keys these are, for messages (`train.fsdp`).
    """
    reader = _Reader(params=params, owner=owner or path)
    value = reader.model(tree, model=model, path=path)
    return Checked(
        value=value if isinstance(value, model) else None, problems=tuple(reader.problems), read=reader.read_keys
    )


@dataclass(kw_only=True, slots=True)
class _Reader:
    params: Mapping[str, Param]
    owner: str
    problems: list[Problem] = field(default_factory=list)
    read_keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the model validated last, which is the outermost."""

    def _problem(
        self, code: str, found: str, *, path: str, position: Position, allowed: tuple[str, ...] = (), **more: Any
    ) -> _Bad:
        self.problems.append(Problem(position=position, path=path, code=code, found=found, allowed=allowed, **more))
        return _BAD

    def model(self, node: Node, *, model: type[BaseModel], path: str) -> BaseModel | _Bad:
        """A mapping as an instance of `model`."""
        if not isinstance(node, MapNode):
            return self._wrong(node, wanted=f"a mapping with {_some(tuple(model.model_fields))}", path=path)
        names = {info.alias or name: info for name, info in model.model_fields.items()}
        values: dict[str, Any] = {}
        complete = True
        for entry in node.entries:
            below = f"{path}.{entry.name}"
            if entry.name not in names:
                complete = False
                self._problem(
                    "unknown-key",
                    f"{self.owner} has no key {entry.name!r}",
                    path=below,
                    position=entry.position,
                    allowed=tuple(names),
                    nearest=nearest_name(entry.name, tuple(names)),
                )
                continue
            value = self._field(entry.value, info=names[entry.name], path=below)
            complete = complete and not isinstance(value, _Bad)
            values[entry.name] = value
        for name, info in names.items():
            if info.is_required() and name not in values:
                complete = False
                about = f" ({info.description})" if info.description else ""
                found = f"the required key {name!r} is missing{about}"
                self._problem("missing-key", found, path=f"{path}.{name}", position=node.position)
        return self._validate(node, model=model, path=path, values=values, complete=complete)

    def _validate(
        self, node: MapNode, *, model: type[BaseModel], path: str, values: dict[str, Any], complete: bool
    ) -> BaseModel | _Bad:
        good = {name: value for name, value in values.items() if not isinstance(value, _Bad)}
        self.read_keys = good
        try:
            made = model.model_validate(good)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                if detail["type"] != "missing":
                    self._translate(detail, node=node, path=path)
            return _BAD
        return made if complete else _BAD

    def _translate(self, detail: ErrorDetails, *, node: MapNode, path: str) -> None:
        """A pydantic error as a problem at the deepest node that its location leads to."""
        where: Node = node
        for part in detail["loc"]:
            below = _child(where, str(part))
            if below is None:
                break
            where, path = below, f"{path}.{part}"
        text = where.text if isinstance(where, ScalarNode) else None
        from_param = f" (from {text})" if text is not None and parse_template(text).params else ""
        context = detail.get("ctx", {})
        shown = repr(detail["input"])
        if detail["type"] in _BOUNDS:
            key, sign = _BOUNDS[detail["type"]]
            found, allowed = f"{shown}{from_param} is out of range", (f"{sign} {context[key]}",)
            self._problem("out-of-range", found, path=path, position=where.position, allowed=allowed)
        elif detail["type"] == "string_pattern_mismatch":
            found, allowed = f"{shown}{from_param} has the wrong form", (context["pattern"],)
            self._problem("wrong-form", found, path=path, position=where.position, allowed=allowed)
        elif detail["type"] == "value_error":
            self._problem("wrong-value", f"{context['error']}{from_param}", path=path, position=where.position)
        else:
            found = f"{shown}{from_param}: {detail['msg']}"
            self._problem("wrong-value", found, path=path, position=where.position)

    def _field(self, node: Node, *, info: FieldInfo, path: str) -> Any:
        value = self.read(node, annotation=info.annotation, path=path)
        if isinstance(value, _Bad) and self.problems and _is_nothing(node) and not info.is_required():
            default = info.get_default(call_default_factory=False)
            if self.problems[-1].path == path and default is not PydanticUndefined:
                hint = f"remove the key to take the default {default!r}"
                self.problems[-1] = replace(self.problems[-1], hint=hint)
        return value

    def read(self, node: Node, *, annotation: Any, path: str) -> Any:
        """A node as a value of `annotation`, or `_BAD` after telling why not."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.read(node, annotation=arguments[0], path=path)
        if origin in (Union, types.UnionType):
            return self._union(node, members=arguments, path=path)
        if origin is Literal:
            return self._literal(node, choices=arguments, path=path)
        if origin in (list, tuple):
            return self._list(node, item=arguments[0], path=path)
        if origin is dict:
            return self._dict(node, value=arguments[1], path=path)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            # A model that is written as one scalar (a reference to an output) parses its text itself.
            return node.text if isinstance(node, ScalarNode) else self.model(node, model=annotation, path=path)
        if annotation in CONVERTERS:
            return self._scalar(node, wanted=annotation, path=path)
        raise TypeError(f"{path}: a parameter model may not use the annotation {annotation!r}")

    def _union(self, node: Node, *, members: tuple[Any, ...], path: str) -> Any:
        if type(None) in members and _is_nothing(node):
            return None
        members = tuple(member for member in members if member is not type(None))
        if len(members) == 1:
            return self.read(node, annotation=members[0], path=path)
        if isinstance(node, ScalarNode):
            models = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
            if models and isinstance(parse_template(node.text).whole, StageReference):
                return self.read(node, annotation=models[0], path=path)
            plain = tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in members)
            words = tuple(choice for member in plain if get_origin(member) is Literal for choice in get_args(member))
            scalars = tuple(member for member in plain if member in CONVERTERS)
            if words and (not scalars or self._is_word(node, words=words)):
                return self._literal(node, choices=words, path=path)
            return self._scalar_of(node, choices=scalars, path=path)
        wanted = list if isinstance(node, ListNode) else dict
        for member in members:
            is_model = isinstance(member, type) and issubclass(member, BaseModel)
            if get_origin(member) is wanted or (is_model and wanted is dict):
                return self.read(node, annotation=member, path=path)
        return self._wrong(node, wanted=" or ".join(_kind_words(member) for member in members), path=path)

    def _is_word(self, node: ScalarNode, *, words: tuple[Any, ...]) -> bool:
        """True where the text, or that of the parameter it refers to, is one of the words."""
        whole = parse_template(node.text).whole
        param = self.params.get(whole.name) if isinstance(whole, ParamReference) else None
        text = node.text if param is None else canonical_text(param.value)
        return text in {canonical_text(word) for word in words}

    def _literal(self, node: Node, *, choices: tuple[Any, ...], path: str) -> Any:
        texts = {canonical_text(choice): choice for choice in choices}
        allowed = tuple(texts)
        if not isinstance(node, ScalarNode):
            return self._wrong(node, wanted=f"one of {', '.join(allowed)}", path=path)
        text = self._text(node, path=path)
        if isinstance(text, _Bad):
            return text
        if text in texts:
            return texts[text]
        return self._problem(
            "wrong-value",
            f"{text!r} is none of the choices",
            path=path,
            position=node.position,
            allowed=allowed,
            nearest=nearest_name(text, allowed),
        )

    def _list(self, node: Node, *, item: Any, path: str) -> Any:
        if not isinstance(node, ListNode):
            return self._wrong(node, wanted="a list, written [a, b] or one `- item` a line", path=path)
        items = [self.read(entry, annotation=item, path=f"{path}.{index}") for index, entry in enumerate(node.items)]
        return _BAD if any(isinstance(value, _Bad) for value in items) else items

    def _dict(self, node: Node, *, value: Any, path: str) -> Any:
        if not isinstance(node, MapNode):
            return self._wrong(node, wanted="a mapping of names to values", path=path)
        values = {
            entry.name: self.read(entry.value, annotation=value, path=f"{path}.{entry.name}") for entry in node.entries
        }
        return _BAD if any(isinstance(made, _Bad) for made in values.values()) else values

    def _scalar(self, node: Node, *, wanted: type, path: str) -> Scalar | _Bad:
        if not isinstance(node, ScalarNode):
            return self._wrong(node, wanted=TYPE_WORDS[wanted], path=path)
        template = parse_template(node.text)
        if isinstance(template.whole, ParamReference):
            return self._param(node, name=template.whole.name, wanted=wanted, path=path)
        if wanted is str and _is_nothing(node):
            return self._wrong(node, wanted="text", path=path, hint="quote it to make it text")
        if wanted is str:
            return self._fill(node, template=template, path=path)
        if template.stages:
            return self._no_artifact(node, wanted=TYPE_WORDS[wanted], path=path)
        if not template.is_literal:
            return self._number_around_reference(node, template=template, wanted=wanted, path=path)
        if not node.plain:
            return self._wrong(node, wanted=TYPE_WORDS[wanted], path=path, hint="quotes make it text; remove them")
        return self._convert(node, wanted=wanted, path=path)

    def _convert(self, node: ScalarNode, *, wanted: type, path: str) -> Scalar | _Bad:
        if _is_nothing(node):
            return self._wrong(node, wanted=TYPE_WORDS[wanted], path=path)
        try:
            return CONVERTERS[wanted](node.text)
        except ValueError as error:
            allowed = (TYPE_WORDS[wanted],)
            return self._problem("wrong-type", str(error), path=path, position=node.position, allowed=allowed)

    def _number_around_reference(self, node: ScalarNode, *, template: Template, wanted: type, path: str) -> _Bad:
        if not self._usable(template):
            return _BAD
        wanted_words = f"{TYPE_WORDS[wanted]}, not text around a reference"
        return self._wrong(node, wanted=wanted_words, path=path, hint="write the reference alone")

    def _scalar_of(self, node: ScalarNode, *, choices: tuple[type, ...], path: str) -> Scalar | _Bad:
        """Where several types fit, an unquoted scalar is what YAML 1.2 reads, a quoted one is text."""
        template = parse_template(node.text)
        if isinstance(template.whole, ParamReference):
            param = self.params.get(template.whole.name)
            wanted = param.type if param else str
        else:
            wanted = str if not node.plain or not template.is_literal else type(core_value(node.text))
        if wanted not in choices:
            wanted = float if wanted is int and float in choices else (str if str in choices else choices[0])
        return self._scalar(node, wanted=wanted, path=path)

    def _param(self, node: ScalarNode, *, name: str, wanted: type, path: str) -> Scalar | _Bad:
        param = self.params.get(name)
        if param is None:
            return _BAD
        if param.type is wanted:
            return param.value
        if wanted is float and param.type is int:
            return float(param.value)
        if wanted is str:
            return canonical_text(param.value)
        return self._problem(
            "wrong-type",
            f"the parameter {name!r} is declared {param.declared}",
            path=path,
            position=node.position,
            allowed=(TYPE_WORDS[wanted],),
            hint=f"declare params.{name} with type: {wanted.__name__}",
        )

    def _text(self, node: ScalarNode, *, path: str) -> str | _Bad:
        return self._fill(node, template=parse_template(node.text), path=path)

    def _fill(self, node: ScalarNode, *, template: Template, path: str) -> str | _Bad:
        """Text with its parameters put in."""
        if template.stages:
            return self._no_artifact(node, wanted="text", path=path)
        if not self._usable(template):
            return _BAD
        filled = (
            canonical_text(self.params[part.name].value) if isinstance(part, ParamReference) else part
            for part in template.parts
        )
        return "".join(str(part) for part in filled)

    def _usable(self, template: Template) -> bool:
        return not template.malformed and all(reference.name in self.params for reference in template.params)

    def _no_artifact(self, node: ScalarNode, *, wanted: str, path: str) -> _Bad:
        return self._problem(
            "unexpected-reference",
            f"{node.text} is an artifact, and this takes {wanted}",
            path=path,
            position=node.position,
        )

    def _wrong(self, node: Node, *, wanted: str, path: str, hint: str = "") -> _Bad:
        return self._problem(
            "wrong-type", f"found {_describe(node)}", path=path, position=node.position, allowed=(wanted,), hint=hint
        )


def _kind_words(member: Any) -> str:
    if isinstance(member, type) and issubclass(member, BaseModel):
        return f"a mapping with {_some(tuple(member.model_fields))}"
    return TYPE_WORDS.get(member, "a list")


def _is_nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.plain and is_null(node.text)


def _describe(node: Node) -> str:
    match node:
        case MapNode():
            return "a mapping"
        case ListNode():
            return "a list"
        case ScalarNode():
            if _is_nothing(node):
                return "nothing" if not node.text else f"nothing ({node.text})"
            return f"{node.text!r}" if node.plain else f"the text {node.text!r}"


def _child(node: Node, part: str) -> Node | None:
    match node:
        case MapNode():
            return node.get(part)
        case ListNode():
            return node.items[int(part)] if part.isdigit() and int(part) < len(node.items) else None
        case ScalarNode():
            return None


def _some(names: tuple[str, ...]) -> str:
    return "the keys " + ", ".join(names)
