"""A client that sends a bomb gets a 400 in time, before the first byte, and nobody else waits for it."""

import asyncio
import json
import time

import httpx
import pytest
from test_structured_grammar import ENDLESS, REFUSED

from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.sampling_fields import ServedModel

DEADLINE_SECONDS = 1.0
# Beside the deadline: starting two processes on two busy cores.
REACTION_SECONDS = 20
PLAIN = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def compiler(vocabulary):
    made = GrammarCompiler(vocabulary, deadline_seconds=DEADLINE_SECONDS)
    yield made
    made.close()


@pytest.fixture
def surface(engine, tokenizer, vocabulary, compiler):
    return make_surface(
        engine=engine,
        encoder=tokenizer,
        decoder=vocabulary,
        model=ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=(0,)),
        facts={},
        compile_grammar=compiler.answer,
    )


def body_of(constraint, **more):
    kind, text = constraint[:2]
    if kind == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": text}}
        return {**PLAIN, "response_format": form, **more}
    return {**PLAIN, kind: text, **more}


def together(surface, *bodies):
    """Status, body and seconds of each of some requests sent at once."""

    async def timed(client, body):
        started = time.monotonic()
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code, answer.text, time.monotonic() - started

    async def send():
        transport = httpx.ASGITransport(app=make_app(surface))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(timed(client, body) for body in bodies))

    return asyncio.run(send())


@pytest.mark.parametrize(("name", "stream"), list(zip(ENDLESS, (False, True), strict=True)))
def test_a_bomb_is_a_400_in_time_and_others_are_answered_meanwhile(surface, name, stream):
    bomb, plain = together(surface, body_of(ENDLESS[name], stream=stream), PLAIN)
    assert bomb[0] == 400 and bomb[2] < DEADLINE_SECONDS + REACTION_SECONDS
    error = json.loads(bomb[1])["error"]
    assert error["param"] == "response_format" and "takes more than 1 s" in error["message"]
    assert plain[0] == 200 and plain[2] < bomb[2]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_field(surface, name):
    kind = REFUSED[name][0]
    ((status, text, _),) = together(surface, body_of(REFUSED[name], stream=True))
    assert status == 400
    assert json.loads(text)["error"]["param"] == ("response_format" if kind == "json_schema" else kind)


def test_choices_of_one_prompt_each_follow_the_grammar(surface):
    ((status, text, _),) = together(surface, {**PLAIN, "regex": "(ab|cd){3}", "n": 4, "temperature": 1.5, "seed": 3})
    assert status == 200
    texts = [choice["text"] for choice in json.loads(text)["choices"]]
    assert len(texts) == 4 and len(set(texts)) > 1
    assert all(len(found) == 6 and set(found[0::2]) <= {"a", "c"} for found in texts)
