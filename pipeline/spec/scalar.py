"""Text to a value of a declared type.

Owns what counts as an integer, a number, a boolean and nothing at all: YAML 1.2's core schema, whole texts only. Pure.
The one decision: the caller says the type; only where no type is declared (`core_value`) does the look decide.
"""

import math
import re
from collections.abc import Callable, Mapping

Scalar = bool | int | float | str

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_LARGEST = 2**63 - 1
_MAX_DIGITS = 64
"""Longer integers are refused before they are converted; all beyond 2**63 are refused after."""


def is_null(text: str) -> bool:
    """True for what YAML reads as no value, where it is not quoted."""
    return text in _NULLS


def to_integer(text: str) -> int:
    """`150`, `-3`, `0x1F`, `0o17`; never `1.0` or `1e3`.

    Raises:
        ValueError: the text is no integer, or beyond 64 bits.
    """
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number this long does not fit 64 bits")
    if _INTEGER.fullmatch(text):
        value = int(text)
    elif _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        value = int(text, 0)
    else:
        raise ValueError(f"{text!r} is not a whole number")
    if not -_LARGEST - 1 <= value <= _LARGEST:
        raise ValueError(f"{text} does not fit 64 bits")
    return value


def to_float(text: str) -> float:
    """`1e-5`, `.5`, `3`, `0.1`; finite only.

    Raises:
        ValueError: the text is no number, or not finite.
    """
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    if not _FLOAT.fullmatch(text):
        raise ValueError(f"{text!r} is not a number")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is larger than a 64-bit number can be")
    return value


def to_boolean(text: str) -> bool:
    """`true` or `false`; never `yes`, `on` or `1`.

    Raises:
        ValueError: the text is neither.
    """
    if text not in _BOOLEANS:
        raise ValueError(f"{text!r} is no boolean")
    return _BOOLEANS[text]


CONVERTERS: Mapping[type, Callable[[str], Scalar]] = {bool: to_boolean, int: to_integer, float: to_float, str: str}
TYPE_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number such as 150",
    float: "a number such as 0.1 or 1e-5",
    str: "text",
}


def core_value(text: str) -> Scalar | None:
    """What YAML 1.2 reads in an unquoted scalar: null, a boolean, an integer, a number, else text."""
    if is_null(text):
        return None
    for convert in (to_boolean, to_integer, to_float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def canonical_text(value: Scalar) -> str:
    """A value as text inside longer text; equal values give equal texts however they were written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)
