"""The body of `/v1/chat/completions`, read and judged.

Owns every rule about what a client may ask there. Pure. The one decision: a body is judged completely, up to the
rendered prompt, before anything starts; what the model's own template does not take is a 400 as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.serving.grammar import response_format
from pipeline.serving.grammar.response_format import Constraint, call_of_one, read_constraint
from pipeline.serving.http.chat_messages import Tools, read_messages, read_tools
from pipeline.serving.http.chat_template import ChatTemplate, TemplateRefusal
from pipeline.serving.http.completion_request import Encoder
from pipeline.serving.http.sampling_fields import (
    FIELDS,
    IGNORED,
    SamplingFields,
    ServedModel,
    check_context,
    read_sampling,
    read_top,
    refuse_unless_neutral,
)
from pipeline.serving.json_body import Fields, Rejected, shown

READ = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
    *("top_logprobs", "chat_template_kwargs", *FIELDS, *response_format.FIELDS),
)
NOT_COMPUTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "choices are not ranked by this server; ask for n of them"),
    "suffix": (("",), "this server continues a chat and does not fill a gap in a text"),
    "echo": ((False,), "a chat has no one prompt to repeat"),
    "functions": (([],), "was replaced by tools"),
    "function_call": (("none", "auto"), "was replaced by tool_choice"),
    "modalities": ((["text"],), "this model writes text"),
    "audio": ((), "this model writes text"),
    "prediction": ((), "no prediction is used here"),
    "web_search_options": ((), "this server searches nothing"),
    "reasoning_effort": (
        (),
        "the model's own template says what it reads, such as chat_template_kwargs: {enable_thinking: false}",
    ),
    "verbosity": ((), "this model knows no such setting"),
}
_RENDERED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are no settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A body without faults."""

    prompt: tuple[int, ...]
    fields: SamplingFields
    max_tokens: int
    logprobs: int | None
    """Alternatives a token; None where none were asked for."""
    tool_names: tuple[str, ...]
    """What the model may call."""
    constraint: Constraint | None


def parse_chat(
    fields: Mapping[str, Any], *, model: ServedModel, template: ChatTemplate | None, encoder: Encoder
) -> ChatRequest:
    """Judge a body that names this model.

    Raises:
        Rejected: 400 with every complaint.
    """
    if template is None:
        raise Rejected(
            f"the model {model.name!r} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); use /v1/completions",
            param="model",
        )
    reader = Fields(fields)
    messages = read_messages(reader, arguments=template.arguments)
    tools = read_tools(reader)
    sampling = read_sampling(reader, model=model)
    length_name, max_tokens = _max_tokens(reader, context=model.context)
    logprobs = _logprobs(reader, model=model)
    constraint = _constraint(reader, tools)
    variables = _variables(reader)
    refuse_unless_neutral(reader, NOT_COMPUTED)
    reader.refuse_unknown((*READ, *NOT_COMPUTED, *IGNORED))
    reader.raise_complaints()
    try:
        text = template.render(messages, tools=tools.offered, variables=variables)
    except TemplateRefusal as error:
        raise Rejected(
            f"messages: the chat template of the model does not take them: {error}", param="messages"
        ) from error
    # The template writes the special tokens itself; those that the tokenizer adds to a plain text would be second ones.
    prompt = tuple(encoder.encode(text, add_special_tokens=False).ids)
    if not prompt:
        raise Rejected("messages: the chat template of the model makes an empty text of them", param="messages")
    wanted = max_tokens if max_tokens is not None else max(1, model.context - len(prompt))
    check_context(len(prompt), max_tokens=wanted, context=model.context, name="messages", length_name=length_name)
    return ChatRequest(
        prompt=prompt,
        fields=sampling,
        max_tokens=wanted,
        logprobs=logprobs,
        tool_names=tools.names,
        constraint=constraint,
    )


def _constraint(reader: Fields, tools: Tools) -> Constraint | None:
    """What a client asked for, or the call that it forces."""
    constraint = read_constraint(reader)
    if not tools.forced:
        if constraint is not None and tools.offered and constraint.field == "response_format":
            reader.complain(
                "response_format",
                "would keep the model from calling a tool; leave out one of the two, or use regex or grammar",
            )
        return constraint
    if constraint is not None:
        reader.complain("tool_choice", f"forces a call, and {constraint.field} constrains the text; only one may")
    try:
        return call_of_one(tools.forced)
    except (ValueError, AttributeError) as error:
        reader.complain("tools", f"their schemas do not go together: {error}")
        return None


def _max_tokens(reader: Fields, *, context: int) -> tuple[str, int | None]:
    """(name of the field, its value); None is the rest of the context."""
    names = ("max_tokens", "max_completion_tokens")
    values = {
        name: reader.integer(name, default=1, low=1, high=context)
        for name in names
        if reader.fields.get(name) is not None
    }
    if len(set(values.values())) > 1:
        reader.complain("max_completion_tokens", "and max_tokens are one thing under two names, and differ here")
    return next(reversed(values.items()), ("max_tokens", None))


def _logprobs(reader: Fields, *, model: ServedModel) -> int | None:
    is_asked = reader.boolean("logprobs")
    if reader.fields.get("top_logprobs") is not None and not is_asked:
        reader.complain("top_logprobs", "is only allowed with logprobs: true")
        return None
    return read_top(reader, "top_logprobs", is_asked=is_asked, model=model)


def _variables(reader: Fields) -> Mapping[str, Any]:
    value = reader.fields.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict) or set(value) & {*_RENDERED}:
        reader.complain(
            "chat_template_kwargs",
            f"must be an object of the template's own variables, without {', '.join(_RENDERED)}; found {shown(value)}",
        )
        return {}
    return value
