"""Tool calls in generated text.

Owns the two forms in which models write them: `<tool_call>{...}</tool_call>` (Hermes, Qwen), and a text that is
nothing but JSON (Llama 3). Pure. The one decision: a call is told as one when it is complete, parses, and names a tool
that was offered; everything else stays text, so nothing that a model said is lost.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may put it before a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Said:
    """What became certain of a text."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: "Said") -> "Said":
        """One after the other."""
        return Said(self.content + other.content, self.calls + other.calls)


class _At(Enum):
    START = auto()
    """Nothing but white space so far."""
    TEXT = auto()
    CALL = auto()
    """Behind an `OPEN`."""
    JSON = auto()
    """The text began with a brace, behind a `PYTHON_TAG` or not."""


class ToolCallReader:
    """Takes a text apart while it arrives."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are those of the tools that were offered."""
        self._names = names
        self._at = _At.START
        self._held = ""
        self._has_calls = False

    def add(self, text: str) -> Said:
        """What became certain with this text."""
        self._held += text
        said = Said()
        while True:
            before = self._at, len(self._held)
            said += self._next()
            if (self._at, len(self._held)) == before:
                return said

    def finish(self) -> Said:
        """What was held back; no text follows."""
        held, self._held = self._held, ""
        if self._at is _At.CALL:
            call = self._call(held)
            return Said(OPEN + held) if call is None else Said(calls=(call,))
        if self._at is _At.JSON:
            calls = self._calls(held)
            return Said(held) if calls is None else Said(calls=calls)
        # White space behind the last call is no content.
        return Said() if self._has_calls and not held.strip() else Said(held)

    def _next(self) -> Said:
        if self._at is _At.START:
            return self._start()
        if self._at is _At.TEXT:
            text, tag, rest = self._held.partition(OPEN)
            if tag:
                self._at, self._held = _At.CALL, rest
                return Said(text)
            cut = len(text) - _overlap(text, OPEN)
            self._held = text[cut:]
            return Said(text[:cut])
        if self._at is _At.CALL and CLOSE in self._held:
            body, _, rest = self._held.partition(CLOSE)
            # White space between calls, and after the last one, is no content.
            self._at, self._held = _At.START, rest
            call = self._call(body)
            return Said(OPEN + body + CLOSE) if call is None else Said(calls=(call,))
        return Said()

    def _start(self) -> Said:
        text = self._held.lstrip()
        if not text or (text != PYTHON_TAG and PYTHON_TAG.startswith(text)) or (text != OPEN and OPEN.startswith(text)):
            return Said()
        if text.startswith(OPEN):
            self._at, self._held = _At.CALL, text.removeprefix(OPEN)
        else:
            first = text.removeprefix(PYTHON_TAG).lstrip()[:1]
            if first:
                self._at = _At.JSON if first == "{" else _At.TEXT
        return Said()

    def _calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """Of a text that is nothing but calls, with semicolons or white space between them."""
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        rest = text.lstrip().removeprefix(PYTHON_TAG).strip()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
                call = self._judged(value)
            except (ValueError, RecursionError):
                return None
            if call is None:
                return None
            calls.append(call)
            rest = rest[end:].lstrip(" \t\r\n;")
        return tuple(calls) or None

    def _call(self, body: str) -> ToolCall | None:
        try:
            return self._judged(json.loads(body))
        except (ValueError, RecursionError):
            return None

    def _judged(self, value: Any) -> ToolCall | None:
        """Raises ValueError where arguments that came as a text are no JSON."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        self._has_calls = True
        return ToolCall(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a start of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
