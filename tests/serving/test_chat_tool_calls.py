"""Tool calls are told from text, however it arrives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.serving.http.chat_tool_calls import Said, ToolCall, ToolCallReader

NAMES = frozenset({"add", "look_up"})
ADD = ToolCall(name="add", arguments='{"a": 3}')
LOOK = ToolCall(name="look_up", arguments='{"word": "Größe"}')
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
HERMES_LOOK = '<tool_call>{"arguments": {"word": "Größe"}, "name": "look_up"}</tool_call>'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 3}}'
LLAMA_LOOK = '{"type": "function", "name": "look_up", "parameters": {"word": "Gr\\u00f6\\u00dfe"}}'
CASES = {
    "text": ("  plain <b>text</b> \n", "  plain <b>text</b> \n", ()),
    "empty": ("", "", ()),
    "white space": (" \n", " \n", ()),
    "one": (HERMES_ADD, "", (ADD,)),
    "two": (HERMES_ADD + "\n" + HERMES_LOOK + "\n", "", (ADD, LOOK)),
    "text before": ("I add.\n" + HERMES_ADD, "I add.\n", (ADD,)),
    "text between and after": (HERMES_ADD + " and " + HERMES_LOOK + " done", " and  done", (ADD, LOOK)),
    "no closing tag": (HERMES_ADD.removesuffix("</tool_call>"), "", (ADD,)),
    "cut short": ('<tool_call>\n{"name": "add", "argu', '<tool_call>\n{"name": "add", "argu', ()),
    "no JSON": ("<tool_call>add(3)</tool_call>", "<tool_call>add(3)</tool_call>", ()),
    "unknown tool": (HERMES_ADD.replace("add", "drop"), HERMES_ADD.replace("add", "drop"), ()),
    "part of a tag": ("a <tool_cal", "a <tool_cal", ()),
    "only part of a tag": ("<tool", "<tool", ()),
    "arguments as text": ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 3}"}</tool_call>', "", (ADD,)),
    "arguments as bad text": (bad := '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', bad, ()),
    "no arguments": ('{"name": "add"}', "", (ToolCall(name="add", arguments="{}"),)),
    "llama": (LLAMA_ADD, "", (ADD,)),
    "llama, tagged": ("<|python_tag|>" + LLAMA_ADD, "", (ADD,)),
    "llama, two": (LLAMA_ADD + "; " + LLAMA_LOOK, "", (ADD, LOOK)),
    "llama, other JSON": ('{"answer": 3}', '{"answer": 3}', ()),
    "llama, one of two unknown": (mixed := LLAMA_ADD + ";" + '{"name": "x"}', mixed, ()),
    "llama, name of another type": ('{"name": ["add"]}', '{"name": ["add"]}', ()),
    "braces of text": ("{not JSON", "{not JSON", ()),
    "JSON inside text": ("see " + LLAMA_ADD, "see " + LLAMA_ADD, ()),
}


def read(pieces):
    reader = ToolCallReader(NAMES)
    said = Said()
    for piece in pieces:
        said += reader.add(piece)
    return said + reader.finish()


@pytest.mark.parametrize("case", CASES)
def test_calls_and_text_are_told_apart_at_every_border_of_pieces(case):
    text, content, calls = CASES[case]
    expected = Said(content, calls)
    assert read([text]) == expected
    assert read(text) == expected
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]]) == expected


@given(
    st.lists(st.sampled_from([*(case[0] for case in CASES.values()), "<", ">", "{", "}", "</tool_call>", "ü"])),
    st.data(),
)
def test_any_text_gives_the_same_however_it_is_cut_and_nothing_is_lost(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text])
    assert read(pieces) == whole
    if not whole.calls:
        assert whole.content == text
    assert all(isinstance(json.loads(call.arguments), dict) and call.name in NAMES for call in whole.calls)


def test_text_is_sent_as_soon_as_it_can_be_no_call():
    reader = ToolCallReader(NAMES)
    assert reader.add("Hello <t") == Said("Hello ")
    assert reader.add("able>") == Said("<table>")
    assert reader.add(HERMES_ADD[:-1]) == Said()
    assert reader.add(HERMES_ADD[-1:]) == Said("", (ADD,))
