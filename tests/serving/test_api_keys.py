"""Keys are read once, known by their digests, and nowhere to be found afterwards."""

import asyncio
import dataclasses
import hashlib
import logging
import traceback

import httpx
import pytest
from text_lengths import served_lengths

from pipeline.errors import ParameterError
from pipeline.serving.http.access import Access, access_of
from pipeline.serving.http.api_keys import bearer_digest, digest_of, is_among, read_key_digests
from pipeline.serving.http.http import make_app
from pipeline.serving.http.rate_limits import RateLimits, Rates
from pipeline.serving.replica_settings import ReplicaConfig, ReplicaSettings, same_executables

KEY, OTHER = "the-first-key-0123456789", "the-other-key-0123456789"


def read(reference, tmp_path, **environment):
    return read_key_digests(reference, environment=environment, directory=tmp_path)


def settings(**more):
    return ReplicaSettings(
        name="tiny",
        model_path="x",
        digest="d",
        version="1",
        deployment_id="i",
        slots=1,
        context=None,
        prefill_chunk_tokens=32,
        decode_steps=4,
        **more,
    )


def test_keys_come_from_the_environment_or_a_file(tmp_path):
    expected = tuple(hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER))
    assert read("env:KEYS", tmp_path, KEYS=f" {KEY},\n{OTHER}, {KEY}") == expected
    (tmp_path / "keys").write_text(f"# of the team\n{KEY}\n\n  {OTHER}  \n")
    assert read("file:keys", tmp_path) == expected
    assert read(f"file:{tmp_path}/keys", tmp_path / "elsewhere") == expected


@pytest.mark.parametrize(
    ("reference", "content", "words"),
    [
        (KEY, None, "must be a reference"),
        ("vault:x", None, "must be a reference"),
        ("env:", None, "must be a reference"),
        ("env:ABSENT", None, "'ABSENT' is not set"),
        ("file:absent", None, "absent: cannot be read: No such file"),
        ("file:keys", b"\xff\xfe", "no text in UTF-8"),
        ("file:keys", b"# nothing\n", "holds no key"),
        ("file:keys", f"{KEY}\nshort-secret\n".encode(), "1 of 2 keys that are not 16 or more"),
        ("file:keys", f"schlüssel-{KEY}".encode(), "1 of 1 keys that are not 16 or more of ASCII"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said_without_a_key(tmp_path, reference, content, words):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ParameterError, match=words) as raised:
        read(reference, tmp_path)
    said = "".join(traceback.format_exception(raised.value, limit=0))
    assert KEY not in said and "short-secret" not in said


def test_a_key_is_compared_with_all_and_a_header_is_read_as_openai_sends_it():
    digests = (digest_of(OTHER), digest_of(KEY))
    assert is_among(digest_of(KEY), digests) and not is_among(digest_of(KEY + "x"), digests)
    assert bearer_digest(f"Bearer {KEY}") == bearer_digest(f"bearer  {KEY} ") == digest_of(KEY)
    for header in ("", "Bearer", "Bearer ", KEY, f"Basic {KEY}"):
        assert bearer_digest(header) is None


def test_settings_decide_who_is_let_in_and_can_change_while_serving():
    access = access_of(settings(api_key_digests=(digest_of(KEY),), smoke_key_digest=digest_of(OTHER)))
    assert access.allows(digest_of(KEY)) and access.allows(digest_of(OTHER))
    assert not access.allows(None) and not access.allows(digest_of("x"))
    limits = access.limits
    access.apply(settings(api_key_digests=(digest_of(OTHER),), max_request_bytes=2048))
    assert not access.allows(digest_of(KEY)) and access.max_request_bytes == 2048
    assert access.limits is limits, "what clients took stays taken"
    access.apply(settings(requests_per_minute=3))
    assert same_executables(settings(), settings(requests_per_minute=3, api_key_digests=("x",))), "nothing to compile"
    assert access.is_open and access.limits.rates == Rates(requests_per_minute=3)


def ask(app, *requests):
    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {}, **more)
                for method, path, key, more in requests
            ]

    return asyncio.run(send())


EMBED = {"json": {"model": "lengths", "input": "abc"}}
PATHS = [
    ("POST", "/v1/embeddings", EMBED, 200),
    ("GET", "/v1/models", {}, 200),
    ("GET", "/v1/models/lengths", {}, 200),
    ("GET", "/metrics", {}, 200),
    ("POST", "/v1/completions", {"content": b"{"}, 400),
    ("GET", "/nowhere", {}, 404),
]


@pytest.mark.parametrize(("method", "path", "more", "status"), PATHS, ids=[f"{path[0]} {path[1]}" for path in PATHS])
def test_nothing_but_health_answers_without_a_known_key(method, path, more, status):
    with served_lengths(access=Access(key_digests=(digest_of(KEY), digest_of(OTHER)))) as surface:
        keys = (None, "unknown-key-0123456789", KEY, OTHER)
        app = make_app(surface)
        none, unknown, first, second = ask(app, *((method, path, key, more) for key in keys))
        opened = ask(app, ("GET", "/health", None, {}), ("GET", "/ready", None, {}))
    assert [answer.status_code for answer in (none, unknown, first, second)] == [401, 401, status, status]
    assert [answer.status_code for answer in opened] == [200, 200]
    for refused in (none, unknown):
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer" and "unknown-key" not in refused.text


def test_each_model_of_a_process_has_keys_of_its_own():
    with (
        served_lengths("one", access=Access(key_digests=(digest_of(KEY),))) as one,
        served_lengths("two", access=Access(key_digests=(digest_of(OTHER),))) as two,
    ):
        app = make_app(one, two)
        asked = [("POST", "/v1/embeddings", KEY, {"json": {"model": name, "input": "a"}}) for name in ("one", "two")]
        first, second, listed = ask(app, *asked, ("GET", "/v1/models", OTHER, {}))
    assert first.status_code == 200
    assert second.status_code == 404 and "'two'" not in second.json()["error"]["message"].partition("has")[2]
    assert [model["id"] for model in listed.json()["data"]] == ["two"]


def test_a_key_is_in_no_log_answer_metric_or_setting(caplog):
    caplog.set_level(logging.DEBUG)
    digests = (digest_of(KEY),)
    limits = RateLimits(Rates(requests_per_minute=2), clock=lambda: 0.0)
    with served_lengths(access=Access(key_digests=digests, limits=limits)) as surface:
        wrong = [("POST", "/v1/embeddings", KEY, {"json": {"model": "x", "input": "a"}})]
        answers = ask(
            make_app(surface),
            *wrong,
            *[("POST", "/v1/embeddings", KEY, EMBED)] * 3,
            ("GET", "/metrics", KEY, {}),
            ("GET", "/health", KEY, {}),
        )
    assert [answer.status_code for answer in answers] == [404, 200, 200, 429, 200, 200]
    config = ReplicaConfig(models=(settings(api_key_digests=digests),))
    places = [*(answer.text + str(answer.headers) for answer in answers), caplog.text, repr(config.as_json())]
    assert all(KEY not in place for place in places)
    assert digests[0] in places[-1]
    assert dataclasses.asdict(config.models[0])["api_key_digests"] == digests


def test_bodies_and_rates_have_limits():
    limits = RateLimits(Rates(tokens_per_minute=10), clock=lambda: 0.0)
    with served_lengths(access=Access(limits=limits, max_request_bytes=1024)) as surface:
        long, whole, over, never = ask(
            make_app(surface),
            ("POST", "/v1/embeddings", None, {"content": b" " * 1025}),
            ("POST", "/v1/embeddings", None, {"json": {"model": "lengths", "input": "abcdefg"}}),
            ("POST", "/v1/embeddings", None, {"json": {"model": "lengths", "input": "abcdefg"}}),
            ("POST", "/v1/embeddings", None, {"json": {"model": "lengths", "input": "abcdefghijkl"}}),
        )
        text = surface.engine.metrics.render()
    assert long.status_code == 413 and "1024 are allowed" in long.json()["error"]["message"]
    assert whole.status_code == 200 and whole.headers["x-ratelimit-remaining-tokens"] == "3"
    assert over.status_code == 429 and over.headers["retry-after"] == "24"
    assert over.json()["error"]["code"] == "rate_limit_exceeded"
    assert never.status_code == 429 and "retry-after" not in never.headers
    assert 'rejected_requests_total{model_name="lengths",status="429"} 2' in text
