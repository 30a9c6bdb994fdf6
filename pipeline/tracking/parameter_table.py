"""Nested parameters as a flat table of dotted names and texts.

Owns the form in which parameters are remembered and compared between runs. Pure. The one decision: a list of plain
values is one row, written as JSON; anything nested is spread over dotted names, so that a tracker's table can sort
and filter on a single value.
"""

import json
from collections.abc import Mapping, Sequence

from pipeline.tracking.redaction import MASK, names_a_secret, scrub


def flatten(parameters: Mapping[str, object]) -> dict[str, str]:
    """Dotted name to text, secrets masked; an empty mapping or list is one row `{}` or `[]`.

    Pydantic models and other objects with `model_dump` are spread like mappings.
    """
    table: dict[str, str] = {}
    _spread("", parameters, table)
    return table


def _spread(path: str, value: object, table: dict[str, str]) -> None:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        value = dump(mode="json")
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            _spread(f"{path}.{key}" if path else str(key), item, table)
    elif isinstance(value, Sequence) and not isinstance(value, str) and any(_is_nested(item) for item in value):
        for index, item in enumerate(value):
            _spread(f"{path}.{index}", item, table)
    else:
        table[path] = _text(path, value)


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "model_dump")


def _text(path: str, value: object) -> str:
    if names_a_secret(path) and value not in (None, ""):
        return MASK
    if isinstance(value, str):
        return scrub(value)
    if value is None or isinstance(value, bool | int | float | Mapping | Sequence):
        return scrub(json.dumps(value, default=str))
    return scrub(str(value))
