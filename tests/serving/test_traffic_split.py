"""The challenger answers its share, the champion the rest, and whatever the challenger does not answer."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from traffic_apps import GREEDY, Answering, ask

from pipeline.errors import ParameterError
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.http.access import Access
from pipeline.serving.http.api_keys import digest_of
from pipeline.serving.http.http_routes import make_application
from pipeline.serving.http.model_registry import ModelRegistry
from pipeline.serving.traffic.traffic_conditions import measured
from pipeline.serving.traffic.traffic_settings import TrafficSettings, read_traffic
from pipeline.serving.traffic.traffic_split import Traffic, TrafficSplit
from pipeline.serving.traffic.traffic_window import read_evidence

CANARY = TrafficSettings(
    mode="canary", trial_id="t", model="tiny", challenger_url="http://challenger", percent=100.0, first_byte_seconds=5.0
)


class Split:
    """A champion, a challenger, and the middleware between them."""

    def __init__(self, challenger, *, champion=None, clock=None, **settings):
        self.champion = champion or Answering("champion")
        self.challenger = challenger
        given = {} if clock is None else {"clock": clock}
        self.traffic = Traffic(make_challenger=lambda url: challenger, **given)
        self.traffic.configure(dataclasses.replace(CANARY, **settings).as_json())
        self.app = TrafficSplit(self.champion, self.traffic)

    def count(self, arm):
        return {name: count for name, count in self.traffic.report()["arms"][arm].items() if count}

    async def ask(self, *args, **given):
        return await ask(self.app, *args, **given)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def test_the_share_is_kept_and_grows_without_moving_anybody_back():
    keys = [f"key-{number}" for number in range(4000)]
    chosen = {
        percent: {key for key in keys if dataclasses.replace(CANARY, percent=percent).is_chosen(key)}
        for percent in (0, 10, 30, 100)
    }
    assert chosen[0] == set() and chosen[100] == set(keys)
    assert chosen[10] < chosen[30]
    assert len(chosen[10]) == pytest.approx(400, abs=80)  # four standard deviations
    other = dataclasses.replace(CANARY, percent=10, trial_id="u")
    assert {key for key in keys if other.is_chosen(key)} != chosen[10]


def test_a_session_stays_on_its_arm_and_requests_are_spread():
    split = Split(Answering("challenger"), percent=50.0)

    async def work():
        sessions = {
            name: {(await split.ask(headers={"x-session-id": name})).text for _ in range(3)} for name in "abcdefghij"
        }
        again = [(await split.ask(headers={"x-request-id": "7"})).text for _ in range(4)]
        return sessions, again, [(await split.ask()).text for _ in range(40)]

    sessions, again, spread = run(work())
    assert all(len(arms) == 1 for arms in sessions.values())
    assert {next(iter(arms)) for arms in sessions.values()} == {"champion", "challenger"}
    assert len(set(again)) == 1
    assert set(spread) == {"champion", "challenger"}


def test_both_arms_are_counted_with_their_times_and_say_who_they_are():
    split = Split(Answering("challenger", wait=0.05), percent=50.0)

    async def work():
        return [await split.ask() for _ in range(24)]

    answers = run(work())
    arms = [got.headers[b"x-served-by"].decode() for got in answers]
    assert [got.text for got in answers] == arms
    evidence = read_evidence(json.loads(json.dumps(split.traffic.report()["evidence"])))
    assert (evidence.champion.answered, evidence.challenger.answered) == (
        arms.count("champion"),
        arms.count("challenger"),
    )
    found = measured(evidence)
    assert found["error_rate"] == 0.0 and 50 <= found["p50_ttft_ms"] < 1000
    assert found["p50_latency_ratio"] > 2
    families = {family.name: family for family in text_string_to_metric_families(split.traffic.render())}
    counts = {tuple(s.labels.values()): s.value for s in families["traffic_requests"].samples}
    assert counts["challenger", "answered"] == arms.count("challenger")
    buckets = {
        s.labels["le"]: s.value
        for s in families["traffic_latency_seconds"].samples
        if s.name.endswith("_bucket") and s.labels["arm"] == "challenger"
    }
    assert buckets["0.025"] == 0 and buckets["+Inf"] == arms.count("challenger")


@pytest.mark.parametrize(
    "challenger",
    [
        Answering("challenger", status=500),
        Answering("challenger", status=503),
        Answering("challenger", status=404),
        Answering("challenger", fail_after=0),
        Answering("challenger", wait=30.0),
    ],
    ids=["500", "503", "404", "raises", "hangs"],
)
def test_the_champion_answers_for_a_challenger_that_fails_before_its_first_byte(challenger):
    split = Split(challenger, first_byte_seconds=0.1)
    got = run(split.ask())
    assert (got.status, got.text, got.is_whole) == (200, "champion", True)
    assert split.champion.asked[0][1] == json.dumps(GREEDY).encode()
    assert split.count("challenger") == {"failed": 1} and split.count("champion") == {"answered": 1}
    assert split.traffic.report()["fallbacks"] == 1


def test_what_both_refuse_is_the_clients_fault_and_comes_from_the_champion():
    split = Split(Answering("challenger", status=400), champion=Answering("champion", status=400))
    got = run(split.ask())
    assert (got.status, got.text) == (400, "champion")
    assert split.count("challenger") == {"refused": 1} == split.count("champion")


def test_a_challenger_that_breaks_off_breaks_the_clients_answer_and_is_blamed():
    split = Split(Answering("challenger", chunks=[b"one", b"two", b"three"], fail_after=2))
    got = None

    async def work():
        with pytest.raises(RuntimeError, match="breaks off"):
            await split.ask()

    run(work())
    assert got is None and split.champion.asked == []
    assert split.count("challenger") == {"failed": 1}


def test_an_error_event_in_a_stream_is_an_error():
    events = [b'data: {"choices": []}\n\n', b'data: {"error": {"message": "no"}}\n\n']
    split = Split(Answering("challenger", chunks=events))
    assert run(split.ask()).body == b"".join(events)
    assert split.count("challenger") == {"failed": 1}


def test_a_stream_passes_chunk_by_chunk_and_as_it_comes():
    """The second chunk is made only when the client has the first."""

    async def work():
        seen = asyncio.Event()

        async def challenger(scope, receive, send):
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await asyncio.wait_for(seen.wait(), 5)
            await send({"type": "http.response.body", "body": b"second", "more_body": False})

        split = Split(challenger)
        parts = []

        async def send(message):
            parts.append(message.get("body", message.get("status")))
            if message.get("body") == b"first":
                seen.set()

        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive():
            return next(messages, None) or await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await split.app(scope, receive, send)
        return parts

    assert run(work()) == [200, b"first", b"second"]


def test_a_client_that_goes_away_reaches_the_challenger_and_blames_nobody():
    async def work():
        challenger = Answering("challenger")
        challenger.release = asyncio.Event()
        split = Split(challenger)
        gone = asyncio.Event()
        asking = asyncio.ensure_future(split.ask(gone=gone))
        while not challenger.asked:
            await asyncio.sleep(0.005)
        gone.set()
        await asking
        return split

    split = run(work())
    assert split.challenger.num_gone == 1
    assert split.champion.asked == []
    assert split.count("challenger") == {"gone": 1}
    assert split.traffic.report()["fallbacks"] == 0


def test_without_a_trial_and_beside_the_work_nothing_is_touched():
    split = Split(Answering("challenger"))

    async def work():
        beside = [await split.ask(path="/v1/models", method="GET"), await split.ask(path="/health", method="GET")]
        other_model = await split.ask({**GREEDY, "model": "another"})
        split.traffic.configure({})
        after = await split.ask()
        return [*beside, other_model, after], (await split.ask(path="/traffic", method="GET")).body

    answers, report = run(work())
    assert [got.text for got in answers] == ["champion"] * 4
    assert all(b"x-served-by" not in got.headers for got in answers)
    assert split.challenger.asked == []
    assert json.loads(report) == {"trial": None} and split.traffic.render() == ""


def test_a_body_that_is_too_long_to_keep_goes_to_the_champion_whole():
    split = Split(Answering("challenger"))
    received = []

    async def champion(scope, receive, send):
        while True:
            message = await receive()
            received.append(message["body"])
            if not message["more_body"]:
                break
        await Answering("champion")(scope, lambda: asyncio.sleep(0, {"body": b""}), send)

    split.app = TrafficSplit(champion, split.traffic)
    body = b"x" * (4 * 2**20 + 10)
    assert run(split.ask(body)).text == "champion"
    assert b"".join(received) == body


def test_the_report_names_the_trial_and_is_found_below_a_route_prefix():
    split = Split(Answering("challenger"))

    async def work():
        await split.ask(root="/prefix")
        return json.loads((await split.ask(path="/traffic", method="GET", root="/prefix")).body)

    report = run(work())
    assert report["trial"]["percent"] == 100.0 and report["arms"]["challenger"]["answered"] == 1
    assert "evidence" not in report
    assert split.challenger.asked[0][0] == "/prefix/v1/completions"


def test_a_trial_that_nobody_judges_any_more_ends_by_itself():
    now = [0.0]
    split = Split(Answering("challenger"), clock=lambda: now[0], lease_seconds=30.0)
    now[0] = 29.0
    assert split.traffic.judged()["trial"] is not None
    now[0] = 58.0
    assert run(split.ask()).text == "challenger"
    assert split.traffic.report()["trial"] is not None, "looking is not judging"
    now[0] = 60.0
    assert run(split.ask()).text == "champion"
    assert split.traffic.judged() == {"trial": None}


def test_requests_of_a_trial_that_ended_finish_and_its_connections_are_closed_after():
    async def work():
        challenger = Answering("challenger")
        challenger.release = asyncio.Event()
        split = Split(challenger)
        asking = asyncio.ensure_future(split.ask())
        while not challenger.asked:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(split.traffic.configure, {})
        assert (await split.ask()).text == "champion"
        challenger.release.set()
        return (await asking).text

    assert run(work()) == "challenger"


def test_the_value_travels_as_json_and_another_one_is_refused():
    assert read_traffic(json.loads(json.dumps(CANARY.as_json()))) == CANARY
    assert read_traffic({}) is None
    with pytest.raises(ParameterError, match=r"unknown: persent.*it has .*percent"):
        read_traffic({**CANARY.as_json(), "persent": 3})
    with pytest.raises(ParameterError, match="missing"):
        read_traffic({"mode": "canary"})


class Guarded:
    """A model that needs a key and has no engine."""

    name, card, facts, created = "tiny", {}, {}, 0
    access = Access(key_digests=(digest_of("secret"),))

    def __init__(self):
        self.endpoints = {"/v1/completions": self.answer}

    async def answer(self, asked):
        return JSONResponse({"choices": [{"index": 0, "text": "champion"}]})

    @property
    def engine(self):
        return SimpleNamespace(metrics=Metrics(model="tiny"))


def test_in_the_application_the_trial_stands_behind_the_keys_and_in_the_metrics():
    registry = ModelRegistry([Guarded()])
    challenger = Answering("challenger")
    registry.traffic = Traffic(make_challenger=lambda url: challenger)
    registry.traffic.configure(CANARY.as_json())
    app = make_application(registry)
    key = {"authorization": "Bearer secret"}

    async def work():
        return (
            await ask(app, path="/traffic", method="GET"),
            await ask(app),
            await ask(app, headers=key),
            await ask(app, path="/traffic", method="GET", headers=key),
            await ask(app, path="/metrics", method="GET", headers=key),
        )

    no_report, no_answer, answer, report, metrics = run(work())
    assert no_report.status == no_answer.status == 401
    assert len(challenger.asked) == 1 and answer.text == "challenger"
    assert json.loads(report.body)["arms"]["challenger"]["answered"] == 1
    families = {family.name: family for family in text_string_to_metric_families(metrics.body.decode())}
    assert {sample.labels["arm"] for sample in families["traffic_requests"].samples} == {"champion", "challenger"}
    assert "engine_steps" in families
