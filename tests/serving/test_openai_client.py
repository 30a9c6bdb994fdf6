"""The official `openai` client against a server on the loopback interface."""

import json
import re

import jsonschema
import openai
import pytest
from loopback import listening
from text_lengths import served_lengths

from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.http.access import Access
from pipeline.serving.http.api_keys import digest_of
from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.rate_limits import RateLimits, Rates
from pipeline.serving.http.sampling_fields import ServedModel
from pipeline.serving.rollout.smoke import smoke

KEY = "key-of-the-test-0123456789"
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
MESSAGES = [{"role": "user", "content": "def main"}]


@pytest.fixture(scope="module")
def grammars(vocabulary):
    made = GrammarCompiler(vocabulary)
    yield made
    made.close()


@pytest.fixture
def surface(engine, tokenizer, grammars):
    return make_surface(
        engine=engine,
        encoder=tokenizer,
        decoder=tokenizer,
        model=ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=(), max_logprobs=5),
        facts={},
        template=ChatTemplate.of({"default": TEMPLATE}, special_tokens={}, where="test"),
        compile_grammar=grammars.answer,
        access=Access(key_digests=(digest_of(KEY),)),
    )


@pytest.fixture
def client(surface):
    with (
        listening(make_app(surface)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30) as made,
    ):
        yield made


def test_models_are_listed_and_described(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pipeline"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions_whole_streamed_and_with_log_probabilities(client):
    asked = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and whole.usage.completion_tokens == 12
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 2
    assert all(number <= 0 for number in choice.logprobs.token_logprobs)
    assert choice.logprobs.text_offset[0] == 0
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in streamed if event.choices) == choice.text
    assert streamed[-1].usage.completion_tokens == 12


def test_a_chat_whole_and_streamed(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**asked)
    assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
    events = list(client.chat.completions.create(**asked, stream=True))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [item for event in events for item in event.choices if item.index == choice.index]
        assert "".join(item.delta.content or "" for item in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason == "length"
    # What the client was given can be sent back.
    again = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "it"}]
    longer = client.chat.completions.create(**{**asked, "messages": again})
    assert longer.usage.prompt_tokens > whole.usage.prompt_tokens


def test_a_chat_with_log_probabilities(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == 8 and all(len(token.top_logprobs) == 3 for token in content)
    assert (
        b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == whole.choices[0].message.content
    )
    assert content[0].top_logprobs[0].token == content[0].token, "greedy takes the likeliest"


def test_an_answer_that_is_held_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": True}}
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=100, response_format=form, seed=1, temperature=1.0
    )
    jsonschema.validate(json.loads(whole.choices[0].message.content), schema)
    assert whole.choices[0].finish_reason == "stop"
    text = client.completions.create(
        model="tiny", prompt="def", max_tokens=60, extra_body={"regex": "(ab|cd){2}x"}, temperature=1.0
    )
    assert text.choices[0].text in ("ababx", "abcdx", "cdabx", "cdcdx")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', None),
        ('I add: <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>', "I add: "),
        ('{"name": "add", "parameters": {"a": 3}}', None),
    ],
)
def test_tool_calls_are_read_out_of_the_text(client, text, content):
    """The model is made to say the text by a regular expression."""
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "extra_body": {"regex": re.escape(text)}}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == content
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3}
    events = list(client.chat.completions.create(**asked, stream=True))
    (streamed,) = [item for event in events for item in event.choices[0].delta.tool_calls or ()]
    assert streamed.index == 0 and streamed.id and streamed.function.arguments == call.function.arguments
    assert "".join(event.choices[0].delta.content or "" for event in events) == (content or "")
    assert events[-1].choices[0].finish_reason == "tool_calls"
    untold = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert untold.message.content == text and untold.message.tool_calls is None and untold.finish_reason == "stop"
    answered = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(**{**asked, "messages": answered, "max_tokens": 2}).usage


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_a_forced_call_has_the_arguments_of_its_schema(client, choice):
    colour = {"$defs": {"colour": {"enum": ["red", "blue"]}}, "properties": {"colour": {"$ref": "#/$defs/colour"}}}
    schema = {"type": "object", **colour, "required": ["colour"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    asked = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": 4}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "paint" and whole.finish_reason == "tool_calls" and whole.message.content is None
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_embeddings_of_another_model_of_the_same_process(surface, tokenizer):
    with served_lengths(encoder=tokenizer) as embedder, listening(make_app(surface, embedder)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30)
        assert {model.id for model in client.models.list()} == {"tiny", "lengths"}
        found = client.embeddings.create(model="lengths", input=["def main", "it"])
        assert found.data[0].embedding[0] == len(tokenizer.encode("def main").ids)
        with pytest.raises(openai.BadRequestError, match="answers /v1/embeddings, not /v1/completions"):
            client.completions.create(model="lengths", prompt="x")
        with pytest.raises(openai.BadRequestError, match="not /v1/embeddings"):
            client.embeddings.create(model="tiny", input="x")
        client.close()


def test_errors_are_the_clients_own_classes(client, surface):
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as raised:
        client.completions.create(model="tiny", prompt="x", extra_body={"temprature": 1})
    assert raised.value.param == "temprature"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as raised:
        client.with_options(api_key="another-key-0123456789").models.list()
    assert raised.value.code == "invalid_api_key"
    surface.access.limits = RateLimits(Rates(requests_per_minute=1), clock=lambda: 0.0)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    first = client.completions.with_raw_response.create(**asked)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as raised:
        client.completions.create(**asked)
    assert raised.value.response.headers["retry-after"] == "60"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_request_of_a_deployment_comes_back(surface, endpoint):
    with listening(make_app(surface)) as url:
        answer = smoke(url, endpoint=endpoint, model="tiny", prompt="def", timeout_seconds=30, api_key=KEY)
    assert answer.count == 16 and answer.unit == "tokens"
    assert KEY not in repr(answer) and "$API_KEY" in answer.curl
