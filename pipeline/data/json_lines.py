"""Documents from JSON Lines.

Owns the reading of one field from each line: a text, or the messages of a conversation. Knows nothing of where the
lines came from, nor of chat templates. The one decision: bad lines
are an error with their numbers, never skipped, because a corpus that shrinks silently is a corpus nobody can rebuild.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.data.document import Document
from pipeline.errors import ParameterError, nearest_name

_SHOWN = 5
"""Bad lines listed in one error."""


Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]
"""The text of a conversation.

Raises:
    ValueError: the model's template does not take it.
"""


def documents_of_lines(name: str, text: str, *, field: str, render: Render | None = None) -> Iterator[Document]:
    """One document for each non-empty line, named `file:line`.

    Args:
        name: of the file.
        text: its content.
        field: holds a text, or a list of messages where there is a `render`.
        render: makes one text of messages.

    Raises:
        ParameterError: a line is not a JSON object with such a value under `field`; lists the first bad lines.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        value = _field(line, field=field, render=render)
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
            hint="every line must be a JSON object with a text under `json_field`, or with messages where `tokenizer` "
            "names a model with a chat template; correct the lines or the name",
        )
    return iter(documents)


class _Bad:
    def __init__(self, problem: str) -> None:
        self.problem = problem


def _field(line: str, *, field: str, render: Render | None) -> str | _Bad:
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
    if isinstance(value, list) and render is not None:
        wrong = [item for item in value if not (isinstance(item, dict) and isinstance(item.get("role"), str))]
        if wrong or not value:
            return _Bad(f"field {field!r} must hold messages with a role, found {str(wrong[:1] or value)[:60]}")
        try:
            return render(value)
        except ValueError as error:
            return _Bad(f"the chat template does not take it: {error}")
    if not isinstance(value, str):
        return _Bad(f"field {field!r} holds {type(value).__name__}, not a string")
    return value
