"""The messages and tools of a chat, judged and brought into the form that templates take.

Owns every rule about them. Pure. The one decision: a template sees texts and plain objects whatever of OpenAI's forms
a client used: parts are joined, arguments are in the form that the template was found to take.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import nearest_name
from pipeline.serving.json_body import Fields, shown

MAX_MESSAGES = 4096
MAX_TOOLS = 128
"""OpenAI's."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": (
        *("role", "content", "name", "tool_calls", "refusal", "reasoning_content", "reasoning", "thinking"),
        *("annotations", "audio", "function_call"),
    ),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning", "thinking")
_NOT_SHOWN = ("refusal", "annotations", "audio", "function_call")
"""Of an answer that a client sends back; templates know none of them."""
Complain = Callable[[str], None]
_TOOL_NAME = re.compile(r"[\w.-]{1,64}")


def read_messages(reader: Fields, *, arguments: Literal["object", "text"]) -> list[dict[str, Any]]:
    """Judge `messages`; complaints are left in `reader`."""
    given = reader.fields.get("messages")
    if not isinstance(given, list) or not given:
        found = "missing" if given is None else f"must be a list of messages that is not empty, found {shown(given)}"
        reader.complain("messages", found)
        return []
    if len(given) > MAX_MESSAGES:
        reader.complain("messages", f"has {len(given)} messages, {MAX_MESSAGES} are allowed")
        return []
    return [_message(reader, index, item, arguments=arguments) for index, item in enumerate(given)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """What the model may call."""

    offered: Sequence[Mapping[str, Any]] | None
    """To the template; None where there are none, or none may be called."""
    forced: Sequence[Mapping[str, Any]] = ()
    """One of these must be called."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that may be called."""
        return tuple(tool["function"]["name"] for tool in self.offered or ())


def read_tools(reader: Fields) -> Tools:
    """Judge `tools` and `tool_choice`; complaints are left in `reader`."""
    tools = _tools(reader, reader.fields.get("tools"))
    choice = reader.fields.get("tool_choice")
    if not any(reader.fields.get("parallel_tool_calls") is value for value in (None, True)):
        reader.complain("parallel_tool_calls", "the number of calls cannot be limited here; leave it out, or true")
    name = _named(choice)
    if choice not in (None, "none", "auto", "required") and name is None:
        form = '{"type": "function", "function": {"name": ...}}'
        reader.complain("tool_choice", f"must be none, auto, required or {form}, found {shown(choice)}")
    elif choice not in (None, "none") and not tools:
        reader.complain("tool_choice", "there are no tools to choose from")
    if choice == "none" or not tools:
        return Tools(offered=None)
    forced = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == name]
    if name is not None and not forced:
        reader.complain("tool_choice", f"there is no tool {name!r}")
    return Tools(offered=tools, forced=forced)


def _named(choice: object) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function" or set(choice) != {"type", "function"}:
        return None
    function = choice["function"]
    name = function.get("name") if isinstance(function, dict) and set(function) == {"name"} else None
    return name if isinstance(name, str) else None


def _message(reader: Fields, index: int, item: object, *, arguments: Literal["object", "text"]) -> dict[str, Any]:
    def complain(text: str) -> None:
        reader.complain("messages", f"item {index} {text}")

    role = item.get("role") if isinstance(item, dict) else None
    if not isinstance(item, dict) or role not in ROLES:
        complain(f"must be an object whose role is one of {', '.join(ROLES)}, found {shown(item)}")
        return {}
    message = {name: value for name, value in item.items() if value is not None}
    _check_fields(message, complain=complain)
    calls = _calls(message.get("tool_calls"), complain=complain, arguments=arguments)
    content = _content(message.get("content"), complain=complain)
    if content is None and not (role == "assistant" and calls):
        complain("lacks content")
    kept = {name: value for name, value in message.items() if name not in (*_NOT_SHOWN, "content", "tool_calls")}
    # A template knows the developer of OpenAI's newer models by the older name.
    kept["role"] = "system" if role == "developer" else role
    if content is not None:
        kept["content"] = content
    return kept | ({"tool_calls": calls} if calls else {})


def _check_fields(message: Mapping[str, Any], *, complain: Complain) -> None:
    known = _KEYS[message["role"]]
    for name in message:
        if name not in known:
            guess = nearest_name(name, known)
            complain(f"has the unknown field {name}" + (f"; did you mean {guess!r}?" if guess else ""))
    for name in _TEXTS:
        if name in message and not isinstance(message[name], str):
            complain(f"has a {name} that is no text: {shown(message[name])}")
    for name in ("audio", "function_call"):
        if name in message:
            complain(f"has {name}, which this server does not take")
    if message["role"] == "tool" and "tool_call_id" not in message:
        complain("is of a tool and lacks tool_call_id")


def _content(value: object, *, complain: Complain) -> str | None:
    """A text, or texts in parts, which are joined by line breaks; None where there is none."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        complain(f"must have a text or a list of parts as content, found {shown(value)}")
        return ""
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) - {"type", "text"}:
            complain(f'has a part that is not {{"type": "text", "text": ...}}: {shown(part)}; this model reads text')
        else:
            texts.append(part["text"])
    return "\n".join(texts)


def _calls(value: object, *, complain: Complain, arguments: Literal["object", "text"]) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        complain(f"has tool_calls that are no list: {shown(value)}")
        return []
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or call.get("type", "function") != "function"
            or not isinstance(function.get("name"), str)
        ):
            complain(
                'has a tool call that is not {"id": ..., "type": "function", "function": {"name": ..., "arguments": '
                f"...}}}}: {shown(call)}"
            )
            continue
        given = _arguments(function.get("arguments", "{}"))
        if given is None:
            complain(f"has a tool call whose arguments are no JSON object: {shown(function.get('arguments'))}")
            continue
        shown_as = given if arguments == "object" else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "type": "function", "function": {**function, "arguments": shown_as}})
    return calls


def _arguments(value: object) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _tools(reader: Fields, value: object) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        reader.complain("tools", f"must be a list of at most {MAX_TOOLS} functions, found {shown(value)}")
        return []
    names: list[str] = []
    for index, tool in enumerate(value):
        problem = _problem_of_tool(tool)
        if problem:
            reader.complain("tools", f"item {index} {problem}")
        elif tool["function"]["name"] in names:
            reader.complain("tools", f"item {index} has the name of another: {tool['function']['name']}")
        else:
            names.append(tool["function"]["name"])
    return value if len(names) == len(value) else []


def _problem_of_tool(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        return (
            f'must be {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}, found {shown(tool)}'
        )
    unknown = sorted({*tool} - {"type", "function"} | {*function} - {"name", "description", "parameters", "strict"})
    if unknown:
        return f"has the unknown field {unknown[0]}"
    if not isinstance(function.get("name"), str) or not _TOOL_NAME.fullmatch(function["name"]):
        return f"needs a name of letters, digits, dots, dashes, at most 64, found {shown(function.get('name'))}"
    if not isinstance(function.get("description"), str | None):
        return f"has a description that is no text: {shown(function['description'])}"
    if not isinstance(function.get("parameters"), dict | None):
        return f"has parameters that are no JSON schema: {shown(function['parameters'])}"
    if not isinstance(function.get("strict"), bool | None):
        return f"has a strict that is not true or false: {shown(function['strict'])}"
    return ""
