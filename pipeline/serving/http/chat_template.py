"""The chat template of a model directory: messages to the text that the model was trained on.

Owns which template there is and how it is rendered. Knows nothing of HTTP. The one decision: a template sees what it
would see in transformers (the same filters, functions, variables and dropped nulls), so its text is the same to the
character; it runs in jinja2's sandbox, because it came with the weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import ArtifactError
from pipeline.serving.engine.tokenizer_file import read_object

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
"""Directory of `NAME.jinja`."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The variables that a template has beside the messages."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which an assistant's reasoning comes; the first is what templates read."""
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises by itself or for messages that it was not written for."""


class TemplateRefusal(Exception):  # noqa: N818 - an answer, not a fault of this program
    """The template does not take these messages."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The templates of a model, by name."""

    templates: Mapping[str, Template]
    special_tokens: Mapping[str, str]
    arguments: Literal["object", "text"]
    """In what form the template takes the arguments of a tool call."""

    @classmethod
    def of(cls, sources: Mapping[str, str], *, special_tokens: Mapping[str, str], where: str) -> "ChatTemplate":
        """Compile.

        Raises:
            ArtifactError: a template cannot be read, or none is the default; `where` is its place.
        """
        if "default" not in sources:
            raise ArtifactError(f"{where}: has the chat templates {', '.join(sorted(sources))}, and no default")
        templates = {name: _compiled(source, where=f"{where} ({name})") for name, source in sources.items()}
        made = cls(templates=templates, special_tokens=special_tokens, arguments="object")
        if made._takes(_PROBE_OBJECT) or not made._takes(_PROBE_TEXT):
            return made
        return cls(templates=templates, special_tokens=special_tokens, arguments="text")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        is_open: bool = True,
    ) -> str:
        """The text that the assistant's next message continues.

        Args:
            messages: plain values of JSON.
            tools: what the assistant may call, as JSON schemas; None where there are none.
            variables: further variables of the template.
            is_open: False for a conversation that has ended, as training reads it.

        Raises:
            TemplateRefusal: the template raises, by itself or because it was not written for such messages.
        """
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        given = {**self.special_tokens, **(variables or {})}
        try:
            return self.templates[name].render(
                messages=[_plain(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=is_open,
                **given,
            )
        except _RENDER_ERRORS as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error

    def _takes(self, arguments: Any) -> bool:
        """True where a tool call with these arguments is rendered, and they are in the text."""
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "answer"},
        ]
        try:
            return _PROBE in self.render(messages, tools=[_PROBE_TOOL])
        except TemplateRefusal:
            return False


_PROBE = "probe-argument"
_PROBE_OBJECT = {_PROBE: 1}
_PROBE_TEXT = json.dumps(_PROBE_OBJECT)
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a model directory; None where it has none.

    `chat_template.jinja` and `additional_chat_templates/` come before the `chat_template` of `tokenizer_config.json`,
    as in transformers.

    Raises:
        ArtifactError: a file cannot be read, or holds no template.
    """
    config = read_object(directory / TOKENIZER_CONFIG)
    where = directory / TEMPLATE_FILE
    sources = _from_files(directory)
    if not sources:
        where = directory / TOKENIZER_CONFIG
        sources = _from_config(config.get("chat_template"), where=where)
    if not sources:
        return None
    more = read_object(directory / SPECIAL_TOKENS_MAP)
    return ChatTemplate.of(sources, special_tokens=special_tokens({**more, **config}), where=str(where))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """By name, from a tokenizer's config, where each is a text or an object with its `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _from_files(directory: Path) -> dict[str, str]:
    paths = {"default": directory / TEMPLATE_FILE} if (directory / TEMPLATE_FILE).is_file() else {}
    paths |= {path.stem: path for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{directory}: a chat template cannot be read: {error}") from error


def _from_config(value: object, *, where: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in value
    ):
        return {item["name"]: item["template"] for item in value}
    raise ArtifactError(f"{where}: chat_template must be a text, or a list of objects with `name` and `template`")


def _compiled(source: str, *, where: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ArtifactError(f"{where}: line {error.lineno} of the chat template: {error.message}") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which templates take for text; an assistant's reasoning under the names that they read."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own would escape what is special in HTML. The signature is what templates call."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateError(message)


def _now(form: str) -> str:
    """In the server's time zone, as transformers does."""
    return datetime.now().astimezone().strftime(form)
