"""JSON bodies, read and judged.

Owns the refusal of a request and the reading of a body's fields by type. Pure. The one decision: complaints are
gathered, so that one answer names everything that is wrong.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import nearest_name


class Rejected(Exception):  # noqa: N818 - an answer, not a fault of this program
    """The request is refused; becomes an OpenAI error body."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """Fields by type; complaints are gathered."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self._complaints: list[tuple[str, str]] = []

    def complain(self, name: str, text: str) -> None:
        """Note what is wrong with a field."""
        self._complaints.append((name, f"{name}: {text}"))

    def raise_complaints(self) -> None:
        """Refuse the body where anything was noted.

        Raises:
            Rejected: 400 with every complaint.
        """
        if self._complaints:
            names = {name for name, _ in self._complaints}
            raise Rejected(
                "; ".join(text for _, text in self._complaints), param=names.pop() if len(names) == 1 else None
            )

    def integer(self, name: str, *, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`; `default` where it is absent or wrong."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.complain(name, f"must be an integer, found {shown(value)}")
        elif not low <= value <= high:
            self.complain(name, f"must be from {low} to {high}, found {value}")
        else:
            return value
        return default

    def number(self, name: str, *, default: float, low: float, high: float, is_low_open: bool = False) -> float:
        """A number from (or above) `low` to `high`; `default` where it is absent or wrong."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.complain(name, f"must be a number, found {shown(value)}")
        elif not (low < value if is_low_open else low <= value) or not value <= high:
            bound = "above" if is_low_open else "from"
            self.complain(name, f"must be {bound} {low:g} to {high:g}, found {value}")
        else:
            return float(value)
        return default

    def boolean(self, name: str) -> bool:
        """True or false; false where it is absent or wrong."""
        value = self.fields.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.complain(name, f"must be true or false, found {shown(value)}")
        return False

    def texts(self, name: str, *, most: int, called: str) -> list[Any]:
        """A string, a list of tokens, or a list of such; as a list, which is empty where it is absent or wrong."""
        value = self.fields.get(name)
        if value is None:
            self.complain(name, "missing")
            return []
        given = [value] if isinstance(value, str) or is_tokens(value) else value
        if not isinstance(given, list) or not given:
            self.complain(name, f"must be a string, a list of strings, or tokens, found {shown(value)}")
            return []
        if len(given) > most:
            self.complain(name, f"has {len(given)} {called}, {most} are allowed")
            return []
        return given

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Complain of every field that is not among `known`."""
        for name in self.fields:
            if name not in known:
                guess = nearest_name(name, known)
                self.complain(name, "unknown field" + (f"; did you mean {guess!r}?" if guess else ""))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; `NaN` and `Infinity`, which JSON does not have, are refused, and halves of characters.

    Raises:
        Rejected: it is something else.
    """
    try:
        fields = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Rejected(f"the body must be a JSON object, found {shown(fields)}")
    if b"\\u" in body:  # only an escape can write one half of a surrogate pair, of which no tokenizer makes a token
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end].encode("unicode_escape").decode()
            raise Rejected(f"the body holds {half}, which is one half of a character") from error
    return fields


def is_tokens(value: object) -> bool:
    """True for a list of integers that is not empty."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def shown(value: object) -> str:
    """A value of a body in an answer, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
