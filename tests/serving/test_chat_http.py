"""What a client of `/v1/chat/completions` sees."""

import asyncio
import json

import httpx
import pytest

from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.sampling_fields import ServedModel

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant{{ suffix_of_role }}:"
)
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "def main"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture
def surface(engine, tokenizer):
    model = ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=())
    template = ChatTemplate.of({"default": TEMPLATE}, special_tokens={}, where="test")
    return make_surface(engine=engine, encoder=tokenizer, decoder=tokenizer, model=model, facts={}, template=template)


def post(surface, fields, path="/v1/chat/completions"):
    async def send():
        transport = httpx.ASGITransport(app=make_app(surface))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=fields)

    surface.client = None
    return asyncio.run(send())


def chat(surface, **fields):
    return post(surface, {**ASKED, **fields})


def events_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_completes_the_rendered_text(surface):
    body = chat(surface).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    prompt = "user: def main\nassistant:"
    plain = post(surface, {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}, "/v1/completions")
    assert choice["message"]["content"] == plain.json()["choices"][0]["text"]
    assert body["usage"] == plain.json()["usage"]


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3, "n": 3}, {"stop": ["a", "xyz"]}])
def test_streaming_adds_up_to_the_plain_message(surface, how):
    plain = chat(surface, max_completion_tokens=40, max_tokens=40, **how).json()
    events = events_of(chat(surface, max_tokens=40, stream=True, stream_options={"include_usage": True}, **how))
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1]["choices"] == [] and events[-1]["usage"] == plain["usage"]
    for choice in plain["choices"]:
        mine = [item for event in events for item in event["choices"] if item["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(item["delta"].get("content", "") for item in mine) == choice["message"]["content"]
        assert [item["finish_reason"] for item in mine][-1] == choice["finish_reason"]


def test_parts_and_developers_are_what_templates_know(surface):
    plain = chat(surface, messages=[{"role": "system", "content": "a\nb"}, *ASKED["messages"]]).json()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = chat(surface, messages=[{"role": "developer", "content": parts}, *ASKED["messages"]]).json()
    assert other["choices"][0]["message"] == plain["choices"][0]["message"]
    assert other["usage"] == plain["usage"]


def test_without_a_limit_the_rest_of_the_context_is_written(surface):
    fields = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    body = post(surface, fields).json()
    assert body["usage"]["total_tokens"] == 160 and body["choices"][0]["finish_reason"] == "length"


def test_a_templates_exception_and_a_missing_template_are_a_400(surface):
    messages = [*ASKED["messages"], {"role": "system", "content": "late"}]
    for stream in (False, True):
        answer = chat(surface, messages=messages, stream=stream)
        assert answer.status_code == 400
        assert "the system speaks first" in answer.json()["error"]["message"]
    surface.template = None
    answer = chat(surface)
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_the_rendered_text_gets_no_second_beginning(surface):
    """A tokenizer adds its special tokens to a plain text, not to a rendered one."""

    class Beginning:
        def encode(self, text, *, add_special_tokens=True):
            found = surface.decoder.encode(text, add_special_tokens=False)
            return type("Encoding", (), {"ids": [0] * add_special_tokens + found.ids})

    surface.encoder = Beginning()
    prompt = "user: def main\nassistant:"
    num_tokens = len(surface.decoder.encode(prompt).ids)
    assert chat(surface).json()["usage"]["prompt_tokens"] == num_tokens
    plain = post(surface, {"model": "tiny", "prompt": prompt, "max_tokens": 12}, "/v1/completions").json()
    assert plain["usage"]["prompt_tokens"] == num_tokens + 1
