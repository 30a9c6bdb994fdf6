"""Which model answers, while models come and go."""

import asyncio

import httpx
import pytest
from text_lengths import Characters, served_lengths

from pipeline.serving.http.http_routes import make_application
from pipeline.serving.http.model_registry import EMBEDDINGS, PREDICT, ModelRegistry


def ask(registry, *requests):
    async def send():
        transport = httpx.ASGITransport(app=make_application(registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(send())


def embed(name, text="abc"):
    return ("POST", EMBEDDINGS, {"model": name, "input": text})


class Replacing(Characters):
    """A tokenizer that takes so long that its model is replaced meanwhile."""

    def __init__(self, replace):
        self._replace = replace

    def encode(self, sequence, *, add_special_tokens=True):
        self._replace()
        return super().encode(sequence)


def test_a_request_whose_model_is_replaced_before_it_starts_goes_to_the_new_one():
    registry = ModelRegistry()

    def replace():
        registry.show([new])
        old.engine.stop(drain_seconds=1)

    with served_lengths("same", encoder=Replacing(replace)) as old, served_lengths("same") as new:
        registry.show([old])
        (answer,) = ask(registry, embed("same"))
        assert answer.status_code == 200 and answer.json()["data"][0]["embedding"] == [3.0, 1.0]
        assert new.engine.metrics.value("rows_total") == 1


def test_a_model_that_stops_and_stays_is_a_503():
    with served_lengths("one") as surface:
        registry = ModelRegistry([surface])
        surface.engine.stop(drain_seconds=1)
        answer, ready, health = ask(registry, embed("one"), ("GET", "/ready", None), ("GET", "/health", None))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert ready.status_code == 503 and health.status_code == 200


def test_models_come_and_go_and_are_told_apart_by_name():
    with served_lengths("one") as one, served_lengths("two") as two:
        registry = ModelRegistry()
        none, ready, health = ask(registry, embed("one"), ("GET", "/ready", None), ("GET", "/health", None))
        assert (none.status_code, ready.status_code, health.json()["models"]) == (404, 503, {})
        registry.show([one, two])
        first, second, other, health = ask(
            registry, embed("one"), embed("two", "ab"), embed("three"), ("GET", "/health", None)
        )
        assert [answer.json()["data"][0]["embedding"][0] for answer in (first, second)] == [3.0, 2.0]
        assert "this server has 'one', 'two'" in other.json()["error"]["message"]
        assert set(health.json()["models"]) == {"one", "two"} and health.json()["status"] == "ok"
        registry.show([two])
        gone, there = ask(registry, embed("one"), embed("two"))
        assert (gone.status_code, there.status_code) == (404, 200)


def test_a_path_that_no_model_answers_says_so():
    with served_lengths("one") as surface:
        unnamed, named = ask(
            ModelRegistry([surface]), ("POST", PREDICT, {"inputs": {}}), ("POST", PREDICT, {"model": "one"})
        )
    assert unnamed.status_code == 404 and "no model of this server answers /v1/predict" in unnamed.text
    assert named.status_code == 400 and "answers /v1/embeddings, not /v1/predict" in named.text


@pytest.mark.parametrize("on_shutdown", [True, False])
def test_the_end_of_the_application_drains_its_engines(on_shutdown):
    with served_lengths("one") as surface:
        stopped = []
        registry = ModelRegistry([surface], on_shutdown=(lambda: stopped.append(1)) if on_shutdown else None)
        app = make_application(registry)

        async def live():
            async with app.router.lifespan_context(app):
                assert not registry.is_draining

        asyncio.run(live())
        assert registry.is_draining
        assert stopped == [1] * on_shutdown
        assert surface.engine.status().is_ready is on_shutdown
