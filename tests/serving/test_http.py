"""What a client of the HTTP surface sees."""

import asyncio
import json

import httpx
import pytest

from pipeline.serving.http.access import MAX_REQUEST_BYTES
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.sampling_fields import ServedModel

GREEDY = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def surface(engine, tokenizer):
    model = ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=())
    facts = {"name": "tiny", "digest": "abc"}
    return make_surface(engine=engine, encoder=tokenizer, decoder=tokenizer, model=model, facts=facts)


def ask(surface, method, path, **given):
    async def send():
        transport = httpx.ASGITransport(app=make_app(surface))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **given)

    surface.client = None
    return asyncio.run(send())


def complete(surface, **fields):
    return ask(surface, "POST", "/v1/completions", json={**GREEDY, **fields})


def events_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(events, choice=0):
    return "".join(item["text"] for event in events for item in event["choices"] if item["index"] == choice)


def test_a_completion_has_the_shape_of_openai(surface):
    body = complete(surface).json()
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["text"]
    num_prompt = len(surface.encoder.encode("def main").ids)
    assert body["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 12, "total_tokens": num_prompt + 12}


@pytest.mark.parametrize("how", [{}, {"stop": ["a", "xyz"]}, {"echo": True}, {"temperature": 1.0, "seed": 5, "n": 3}])
def test_streaming_adds_up_to_the_plain_text(surface, how):
    plain = complete(surface, max_tokens=40, **how).json()
    streamed = complete(surface, max_tokens=40, stream=True, **how)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed)
    assert len(events) > 1
    for choice in plain["choices"]:
        assert text_of(events, choice["index"]) == choice["text"]
    finals = [item for event in events for item in event["choices"] if item["finish_reason"]]
    assert sorted(item["index"] for item in finals) == list(range(len(plain["choices"])))


def test_usage_comes_last_in_a_stream_that_asks_for_it(surface):
    events = events_of(complete(surface, stream=True, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])


def test_prompts_may_be_text_a_list_or_tokens_and_n_multiplies(surface):
    tokens = surface.encoder.encode("def main").ids
    plain = complete(surface).json()["choices"][0]["text"]
    assert complete(surface, prompt=tokens).json()["choices"][0]["text"] == plain
    body = complete(surface, prompt=["def main", "return"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["text"] == body["choices"][1]["text"] == plain
    assert complete(surface, prompt=[tokens, tokens]).json()["choices"][1]["text"] == plain


def test_choices_of_one_prompt_differ_and_a_seed_repeats_them(surface):
    how = {"temperature": 1.5, "seed": 11, "n": 3, "max_tokens": 20}
    first, second = ([choice["text"] for choice in complete(surface, **how).json()["choices"]] for _ in range(2))
    assert first == second and len(set(first)) == 3


def test_echo_gives_the_prompt_too(surface):
    plain = complete(surface).json()["choices"][0]["text"]
    assert complete(surface, echo=True).json()["choices"][0]["text"] == "def main" + plain
    tokens = surface.encoder.encode("def main").ids
    assert complete(surface, echo=True, prompt=tokens).json()["choices"][0]["text"] == "def main" + plain


BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 320]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 200}, "n"),
    ({"n": 100, "prompt": ["a", "b"]}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"echo": "yes"}, "echo"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 2, "echo": True}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 4}, "best_of"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(9))}, "stop_token_ids"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
    ({"suffix": "end"}, "suffix"),
    ({"max_token": 4}, "max_token"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=[json.dumps(fields)[:40] for fields, _ in BAD])
def test_a_bad_field_is_a_400_with_openais_body_before_the_first_byte(surface, fields, param, stream):
    answer = complete(surface, **fields, stream=stream)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and param in error["message"]


def test_every_complaint_is_in_one_answer_with_the_nearest_name(surface):
    message = complete(surface, temperature=9, n="x", max_token=3).json()["error"]["message"]
    for word in ("temperature", "n: must be an integer", "did you mean 'max_tokens'"):
        assert word in message


@pytest.mark.parametrize("stream_options", [[], {"usage": True}, {"include_usage": 1}])
def test_bad_stream_options_are_refused(surface, stream_options):
    assert complete(surface, stream=True, stream_options=stream_options).status_code == 400
    assert complete(surface, stream=False, stream_options={"include_usage": True}).status_code == 400


def test_a_context_that_is_too_long_shows_the_arithmetic(surface):
    answer = complete(surface, prompt=[5] * 150, max_tokens=20)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    for number in ("160", "170", "150", "20"):
        assert number in error["message"]
    assert complete(surface, prompt=[5] * 140, max_tokens=20).status_code == 200


def test_other_models_paths_and_methods_have_openais_error_body(surface):
    assert complete(surface, model="other").status_code == 404
    assert complete(surface, model="other").json()["error"]["code"] == "model_not_found"
    for method, path, status in (
        ("GET", "/v1/chat", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        answer = ask(surface, method, path)
        assert answer.status_code == status and answer.json()["error"]["message"]


HALF = b'{"prompt": "\xed\xa0\x80"}'
"""Of a surrogate pair, in bytes."""


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000, HALF])
def test_a_body_that_is_no_json_object_is_a_400(surface, body):
    answer = ask(surface, "POST", "/v1/completions", content=body)
    assert answer.status_code == 400 and "error" in answer.json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_half_a_character_is_a_400_and_a_whole_one_is_not(surface, path):
    for prompt, status in ((r"\ud83d", 400), (r"a\uDE00", 400), (r"\ud83d\ude00 \u00e9", 200)):
        body = f'{{"model": "tiny", "prompt": "{prompt}", "max_tokens": 1}}'.encode()
        answer = ask(surface, "POST", path, content=body)
        if path == "/v1/completions" or status == 400:
            assert answer.status_code == status
        assert status == 200 or "one half of a character" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_a_413(surface):
    answer = ask(surface, "POST", "/v1/completions", content=b" " * (MAX_REQUEST_BYTES + 1))
    assert answer.status_code == 413

    async def parts():
        for _ in range(5):
            yield b" " * 2**20

    assert ask(surface, "POST", "/v1/completions", content=parts()).status_code == 413


def test_models_health_ready_and_metrics_answer(surface):
    assert ask(surface, "GET", "/v1/models").json()["data"][0]["id"] == "tiny"
    assert ask(surface, "GET", "/v1/models/tiny").json()["max_model_len"] == 160
    health = ask(surface, "GET", "/health").json()
    assert health["status"] == "ok" and health["digest"] == "abc" and health["compiles_while_serving"] == 0
    assert ask(surface, "GET", "/ready").status_code == 200
    complete(surface)
    text = ask(surface, "GET", "/metrics").text
    assert 'generation_tokens_total{model_name="tiny"} 12' in text
    assert 'request_success_total{model_name="tiny",finished_reason="length"} 1' in text
    assert 'time_to_first_token_seconds_count{model_name="tiny"} 1' in text
    assert 'compile_events_total{model_name="tiny",phase="serving"} 0' in text


def test_a_draining_server_answers_503_and_says_when_to_come_back(surface):
    surface.engine.stop(drain_seconds=1)
    answer = complete(surface, stream=True)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert ask(surface, "GET", "/ready").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(surface, stream):
    """At the ASGI level: the client disconnects after the first part of the answer, or at once where there is none."""

    async def go():
        app = make_app(surface)
        body = json.dumps({**GREEDY, "max_tokens": 140, "stream": stream}).encode()
        sent = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            if stream:
                await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body":
                sent.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
        }
        await app(scope, receive, send)
        # The engine takes the request and its end from its queue in its own time; an engine that has not looked yet is
        # balanced too, so the abort itself is waited for.
        for _ in range(1000):
            aborted = surface.engine.metrics.value("aborted_requests_total", label="client")
            if aborted and surface.engine.why_unbalanced() is None:
                return
            await asyncio.sleep(0.01)

    surface.client = None
    asyncio.run(go())
    assert surface.engine.why_unbalanced() is None
    assert surface.engine.metrics.value("aborted_requests_total", label="client") == 1
    assert surface.engine.metrics.value("generation_tokens_total") < 140


def test_a_fault_of_the_server_has_openais_error_body_too(surface, monkeypatch):
    def fail(*given, **named):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("pipeline.serving.http.completion_http.parse_completion", fail)

    async def send():
        transport = httpx.ASGITransport(app=make_app(surface), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json=GREEDY)

    surface.client = None
    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the server failed; its log says why")
