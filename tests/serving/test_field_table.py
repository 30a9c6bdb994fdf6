"""Every field of both endpoints: what is refused, with a 400 before the first byte, and what is taken."""

import asyncio
import json
from functools import partial

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_lengths import Characters, served_lengths

from pipeline.serving.http import chat_request, completion_request
from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.sampling_fields import IGNORED, ServedModel
from pipeline.serving.json_body import Rejected

MODEL = ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=(0,), max_logprobs=5)
TEMPLATE = ChatTemplate.of(
    {"default": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"},
    special_tokens={},
    where="test",
)
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
NAMED = {name: {"type": "function", "function": {"name": name}} for name in ("add", "sub")}
CLASHING = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "$defs": {"a": {"type": name}}}}}
    for name in ("string", "number")
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
BASES = {
    "/v1/completions": {"model": "tiny", "prompt": "hello"},
    "/v1/chat/completions": {"model": "tiny", "messages": [USER]},
}


def number(low, high, good):
    return [low, high, "1", True, [1], {}, float(10**12)], good


# Field -> (what is refused, what is taken); null is as good as nothing everywhere.
SHARED = {
    "model": ([None, 3, ""], ["tiny"]),
    "temperature": number(-0.1, 2.1, [0, 0.5, 2]),
    "top_p": number(0, 1.01, [0.1, 1]),
    "top_k": number(-1, 321, [0, 320]),
    "min_p": number(-0.1, 1.1, [0, 0.5, 1]),
    "repetition_penalty": number(0, 10.1, [0.5, 1, 1.3]),
    "presence_penalty": number(-2.1, 2.1, [-2, 0, 2]),
    "frequency_penalty": number(-2.1, 2.1, [-2, 0, 2]),
    "seed": (["x", 0.5, True, 2**63], [0, -1, 2**63 - 1]),
    "logit_bias": (
        [
            *([], "x", {"320": 1}, {"x": 1}, {"-1": 1}, {"5": "1"}, {"5": True}, {"5": 101}, dict.fromkeys("²", 1)),
            *({"0" * 20 + "320": 1}, {"0" * 5000: 1}, {"07": 1}),
        ],
        [{}, {"0": -100, "319": 100}],
    ),
    "stop": ([3, [""], [1], ["a"] * 17, "x" * 257, {}], ["a", ["a", "b"], []]),
    "stop_token_ids": (["x", [320], [-1], [0.5], [True], list(range(1, 9))], [[], [5, 6]]),
    "n": (number(0, 129, [1, 3])),
    "stream": (["yes", 1, []], [True, False]),
    "stream_options": ([[], {"usage": True}, {"include_usage": 1}], []),
    "max_tokens": number(0, 161, [1, 20]),
    "response_format": (
        ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": {}},
         {"type": "json_schema", "json_schema": {"name": "x"}},
         {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}},
         {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
         {"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}],
        [{"type": "text"}, {"type": "json_object"}, SCHEMA],
    ),
    "regex": (["", 3, ["a"]], ["a+"]),
    "grammar": (["", 3, {}], ['start: "a"']),
    "best_of": ([2, True, "1"], [1]),
    **{name: ([], ["x", {"a": "b"}, True]) for name in IGNORED},
}  # fmt: skip
ONLY = {
    "/v1/completions": {
        "prompt": (
            [None, "", [], {"text": "x"}, ["a", 3], [1, True], [1, 320], [-1], ["a"] * 129, [[]], [""]],
            ["a", ["a", "b"], [1, 2], [[1], [2, 3]]],
        ),
        "echo": (["yes", 1], [True, False]),
        "logprobs": ([True, -1, 6, "1", 1.5], [0, 5]),
        "suffix": (["end", 3], [""]),
    },
    "/v1/chat/completions": {
        "messages": (
            [None, [], "hello", [3], [{}], [{"role": "king", "content": "x"}], [{"role": "user"}],
             [{**USER, "content": 3}], [{**USER, "content": []}], [{**USER, "content": [{"type": "image_url"}]}],
             [{**USER, "content": [{"type": "text"}]}], [{**USER, "name": 3}], [{**USER, "contents": "x"}],
             [{"role": "tool", "content": "x"}], [{"role": "assistant", "content": None}],
             [{"role": "assistant", "tool_calls": "x"}], [{"role": "assistant", "tool_calls": [{}]}],
             [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "a", "arguments": "["}}]}],
             [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "a", "arguments": "3"}}]}],
             [{"role": "assistant", "content": "x", "audio": {"id": "a"}}],
             [USER] * 4097],
            [[USER], [{"role": "developer", "content": "x"}, USER, {"role": "assistant", "tool_calls": [CALLED]},
                      {"role": "tool", "tool_call_id": "c", "content": "3"}],
             [{**USER, "content": [{"type": "text", "text": "x"}], "name": "me"}],
             [USER, {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}]],
        ),
        "tools": (
            ["add", [3], [{}], [{"type": "function"}], [TOOL, TOOL], [TOOL] * 129, [{**TOOL, "more": 1}],
             [{"type": "function", "function": {"name": "a b"}}],
             [{"type": "function", "function": {"name": "a", "parameters": []}}],
             [{"type": "function", "function": {"name": "a", "strict": "yes"}}],
             [{"type": "function", "function": {"name": "a", "description": 3}}]],
            [[], [TOOL]],
        ),
        "tool_choice": (
            ["required", "auto", {"type": "function", "function": {"name": "add"}}, 3, "add", {"type": "function"},
             {"type": "function", "function": {"name": 3}}, {"type": "any"}],
            ["none"],
        ),
        "parallel_tool_calls": ([False, 1], [True]),
        "max_completion_tokens": number(0, 161, [1, 20]),
        "logprobs": ([1, "yes"], [True, False]),
        "top_logprobs": ([3, "x", True, -1], []),
        "chat_template_kwargs": ([3, [], {"messages": []}], [{}, {"enable_thinking": False}]),
        "echo": ([True, 0], [False]),
        "suffix": (["end"], [""]),
        "functions": ([[{"name": "x"}]], [[]]),
        "function_call": ([{"name": "x"}], ["none", "auto"]),
        "modalities": ([["audio"], "text"], [["text"]]),
        "audio": ([{"voice": "x"}], []),
        "prediction": ([{"type": "content"}], []),
        "web_search_options": ([{}], []),
        "reasoning_effort": (["low"], []),
        "verbosity": (["low"], []),
    },
}  # fmt: skip
TABLES = {path: {**SHARED, **own} for path, own in ONLY.items()}
TOGETHER = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 65}, "n"),
    ("/v1/completions", {"echo": True, "logprobs": 1}, "logprobs"),
    ("/v1/completions", {"regex": "a", "grammar": "b"}, "grammar"),
    ("/v1/completions", {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
    ("/v1/chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ("/v1/chat/completions", {"tools": [TOOL], "response_format": SCHEMA}, "response_format"),
    ("/v1/chat/completions", {"regex": "a", "response_format": SCHEMA}, "regex"),
    ("/v1/chat/completions", {"message": []}, "message"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": NAMED["sub"]}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
    ("/v1/chat/completions", {"tools": CLASHING, "tool_choice": "required"}, "tools"),
]
PARSERS = {
    "/v1/completions": completion_request.parse_completion,
    "/v1/chat/completions": partial(chat_request.parse_chat, template=TEMPLATE),
}


@pytest.fixture(scope="module")
def post():
    """`post(path, bodies)`; refusals come before the engine is asked, so any will do."""
    with served_lengths() as other:
        surface = make_surface(
            engine=other.engine, encoder=Characters(), decoder=None, model=MODEL, facts={}, template=TEMPLATE
        )

        def send(path, bodies):
            async def ask():
                transport = httpx.ASGITransport(app=make_app(surface))
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    return [await client.post(path, json=body) for body in bodies]

            return asyncio.run(ask())

        yield send


def check_refused(answer, *, body, name):
    assert answer.status_code in (400, 404 if name == "model" else 400), body
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"], body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "name"), [(path, name) for path, table in TABLES.items() for name in table])
def test_a_bad_value_is_a_400_that_names_the_field(post, path, name, stream):
    bad = TABLES[path][name][0]
    bodies = [{**BASES[path], "stream": stream, name: value} for value in bad]
    for body, answer in zip(bodies, post(path, bodies), strict=True):
        check_refused(answer, body=body, name=name)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, table in TABLES.items() for name in table])
def test_a_good_value_and_null_are_taken(path, name):
    required = ("model", "prompt", "messages")
    for value in [*TABLES[path][name][1], *([] if name in required else [None])]:
        PARSERS[path]({**BASES[path], name: value}, model=MODEL, encoder=Characters())


@pytest.mark.parametrize(("path", "fields", "name"), TOGETHER, ids=[json.dumps(row[1])[:40] for row in TOGETHER])
def test_values_that_do_not_go_together_are_a_400(post, path, fields, name):
    (answer,) = post(path, [{**BASES[path], **fields}])
    check_refused(answer, body=fields, name=name)


@pytest.mark.parametrize(
    ("path", "module"), [("/v1/completions", completion_request), ("/v1/chat/completions", chat_request)]
)
def test_the_table_has_every_field(path, module):
    assert set(TABLES[path]) == {*module.READ, *module.NOT_COMPUTED, *IGNORED}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=6,
)
LIKELY = {
    path: st.sampled_from([value for bad, good in table.values() for value in (*bad, *good)])
    for path, table in TABLES.items()
}


@pytest.mark.parametrize("path", BASES)
@given(data=st.data())
def test_whatever_a_body_holds_it_is_taken_or_refused_with_reasons(path, data):
    fields = data.draw(
        st.dictionaries(st.sampled_from(sorted(TABLES[path])), JSON_VALUES | LIKELY[path], max_size=4)
        | st.dictionaries(st.text(), JSON_VALUES, max_size=2)
    )
    try:
        PARSERS[path]({**BASES[path], **fields}, model=MODEL, encoder=Characters())
    except Rejected as refusal:
        assert refusal.status == 400 and refusal.message
        json.dumps(refusal.body()).encode()


def test_each_reason_is_told_once_with_the_nearest_name(post):
    body = {**BASES["/v1/chat/completions"], "temperature": 3, "tool_chioce": "none", "best_of": 2}
    (answer,) = post("/v1/chat/completions", [body])
    message = answer.json()["error"]["message"]
    for words in ("temperature: must be from 0 to 2", "did you mean 'tool_choice'?", "choices are not ranked"):
        assert message.count(words) == 1
    assert answer.json()["error"]["param"] is None


def test_a_chat_that_is_too_long_shows_the_arithmetic(post):
    body = {**BASES["/v1/chat/completions"], "max_completion_tokens": 150}
    (answer,) = post("/v1/chat/completions", [body])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == "max_completion_tokens"
    num_prompt = len("user: hello\n")
    for number in (160, 150 + num_prompt, num_prompt, 150):
        assert str(number) in error["message"]
