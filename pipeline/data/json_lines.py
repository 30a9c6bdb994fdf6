"""Documents from JSON Lines.

Owns the reading of one field from each line. Knows nothing of where the text came from. The one decision: bad lines
are an error with their numbers, never skipped, because a corpus that shrinks silently is a corpus nobody can rebuild.
"""

import json
from collections.abc import Iterator

from pipeline.data.document import Document
from pipeline.errors import ParameterError, nearest_name

_SHOWN = 5
"""Bad lines listed in one error."""


def documents_of_lines(name: str, text: str, *, field: str) -> Iterator[Document]:
    """One document for each non-empty line, named `file:line`.

    Raises:
        ParameterError: a line is not a JSON object with a string under `field`; lists the first bad lines.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        value = _field(line, field=field)
        if isinstance(value, str):
            documents.append(Document(name=place, text=value))
        else:
            problems.append(f"{place}: {value.problem}")
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ParameterError(
            f"JSON Lines with field {field!r}: {len(problems)} bad of {len(problems) + len(documents)} lines:\n"
            f"  {shown}{more}",
            hint="every line must be a JSON object with a string under `json_field`; correct the lines or the name",
        )
    return iter(documents)


class _Bad:
    def __init__(self, problem: str) -> None:
        self.problem = problem


def _field(line: str, *, field: str) -> str | _Bad:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return _Bad(f"not JSON ({error.msg} at column {error.colno})")
    if not isinstance(record, dict):
        return _Bad(f"a JSON object is wanted, found {type(record).__name__}")
    if field not in record:
        near = nearest_name(field, list(record))
        did_you_mean = f"; did you mean {near!r}?" if near else ""
        return _Bad(f"no field {field!r}; it has: {', '.join(record) or 'none'}{did_you_mean}")
    value = record[field]
    if not isinstance(value, str):
        return _Bad(f"field {field!r} holds {type(value).__name__}, not a string")
    return value
