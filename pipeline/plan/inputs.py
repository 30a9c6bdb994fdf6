"""Which parameters of a kind take artifacts, and of which types.

Owns the reading of the `Accepts` marker and of the field marks of `pipeline.stages.parameters`. Knows nothing of a
flow. The one decision: what a field takes is found in its annotation, also inside lists, dicts and optionals, so a
new kind needs no second table.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.stages.parameters import Parameters
from pipeline.stages.reference import Accepts
from pipeline.stages.user_module import is_function


def accepted_types(model: type[Parameters], path: str) -> tuple[str, ...] | None:
    """Artifact types that fit the parameter at `path` (`evidence.0`, `inputs.left`); None where it takes none."""
    name, _, below = path.partition(".")
    info = model.model_fields.get(name)
    if info is None:
        return None
    return _find(info.annotation, tuple(info.metadata), inside=bool(below))


def takes_artifacts(info: FieldInfo) -> bool:
    """True where a field is, or holds, references to outputs."""
    return any(_find(info.annotation, tuple(info.metadata), inside=inside) is not None for inside in (False, True))


def has_mark(info: FieldInfo, mark: str, *, value: bool) -> bool:
    """True where a field's `json_schema_extra` says `mark: value`."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get(mark) is value


def source_paths(model: type[Parameters], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path of the parameter and path of the file, for each file whose content is part of the identity.

    A value `module:function` names no file; the kind's `sources` speak for its module.

    Args:
        model: the kind's parameters.
        values: parameters by name; those that are absent are left out.
    """
    for name, info in model.model_fields.items():
        if not has_mark(info, "source_file", value=True):
            continue
        value = values.get(name)
        if isinstance(value, str):
            if not is_function(value):
                yield name, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield f"{name}.{index}", item


def _find(annotation: Any, metadata: tuple[Any, ...], *, inside: bool) -> tuple[str, ...] | None:
    """The accepted types of an annotation, or of its items where `inside`."""
    if not inside:
        for mark in metadata:
            if isinstance(mark, Accepts):
                return mark.types
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _find(arguments[0], tuple(arguments[1:]), inside=inside)
    if origin in (Union, types.UnionType):
        found = (_find(member, (), inside=inside) for member in arguments)
        return next((types_ for types_ in found if types_ is not None), None)
    if inside and origin in (list, tuple, dict):
        return _find(arguments[-1] if origin is dict else arguments[0], (), inside=False)
    return None
