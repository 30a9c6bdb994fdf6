"""JSON that came from elsewhere.

Owns the limits under which it is read. Knows nothing of what it means. The one decision: whatever is wrong with such a
file (its size, its depth, a key twice, a pipe in its place) is one kind of error, for its reader to name.
"""

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 100_000_000
"""An index of a million tensors has 100 MB; a longer file is damage or an attack."""


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: it is no regular file, unreadable, too long, not JSON, nested too deep, or names a key twice.
    """
    if not path.is_file():
        raise ValueError("is no regular file" if path.exists() else "missing")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error


def parse_json(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, nested too deep, or names a key twice.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def whole_number(value: Any) -> int:
    """A JSON number that counts something.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"must be a whole number, found {str(value)[:40]!r}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen = [key for key, _ in pairs]
        raise ValueError(f"it names {next(key for key in seen if seen.count(key) > 1)!r} twice")
    return entries
