"""The challenger gets copies; the client gets the champion's answer, as fast as without them."""

import asyncio
import json
import time

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_traffic_split import Split
from traffic_apps import GREEDY, Answering, ask

from pipeline.serving.traffic.traffic_conditions import measured
from pipeline.serving.traffic.traffic_window import read_evidence

HANGING_SECONDS = 1.0
"""After which a copy is given up."""
CLIENT_SECONDS = 0.9
"""For 20 requests to an application that answers at once; 0.01 s measured. One wait for the challenger is longer."""


def shadow(challenger, **given):
    return Split(challenger, mode="shadow", **given)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def compared(split):
    copies = split.traffic.report()["copies"]
    return {name: copies[name] for name in ("equal", "different", "not_comparable", "dropped") if copies[name]}


def settled(split, count):
    return lambda: sum(compared(split).values()) == count


def test_every_copy_is_asked_and_compared_and_the_client_sees_only_the_champion():
    split = shadow(Answering("challenger", text="champion"))

    async def work():
        answers = [await split.ask() for _ in range(5)]
        await split.ask({**GREEDY, "temperature": 1})
        await until(settled(split, 6))
        return answers

    answers = run(work())
    assert {got.text for got in answers} == {"champion"} and len(split.challenger.asked) == 6
    assert {body for _, body, _ in split.challenger.asked[:5]} == {json.dumps(GREEDY).encode()}
    assert compared(split) == {"equal": 5, "not_comparable": 1}
    assert split.count("champion") == {"answered": 6} == split.count("challenger")


def test_a_challenger_that_says_something_else_is_found_out():
    split = shadow(Answering("challenger"))

    async def work():
        await split.ask()
        await until(settled(split, 1))

    run(work())
    assert compared(split) == {"different": 1}
    assert measured(read_evidence(split.traffic.report()["evidence"]))["agreement"] == 0.0


def test_a_challenger_that_hangs_costs_the_client_nothing_and_copies_are_dropped():
    split = shadow(
        Answering("challenger", wait=100.0), queued_copies=2, concurrent_copies=3, first_byte_seconds=HANGING_SECONDS
    )

    async def work():
        started = time.monotonic()
        answers = [await split.ask() for _ in range(20)]
        took = time.monotonic() - started
        await until(settled(split, 20))
        return answers, took

    answers, took = run(work())
    assert {got.text for got in answers} == {"champion"} and took < CLIENT_SECONDS
    found = compared(split)
    # Three are asked and two wait; the others came before the first was given up.
    assert found["dropped"] == 15 and found["not_comparable"] == 5
    assert split.count("challenger") == {"failed": 5}
    assert split.challenger.num_cancelled == 5
    metrics = measured(read_evidence(split.traffic.report()["evidence"]))
    assert metrics["dropped_rate"] == 0.75 and metrics["error_rate"] == 1.0


@pytest.mark.parametrize(
    "challenger",
    [Answering("c", status=500), Answering("c", fail_after=0), Answering("c", chunks=[b"{", b"}"], fail_after=1)],
    ids=["500", "raises", "breaks off"],
)
def test_a_challenger_that_fails_is_counted_and_the_next_copy_is_asked(challenger):
    split = shadow(challenger, concurrent_copies=1)

    async def work():
        answers = [await split.ask() for _ in range(3)]
        await until(settled(split, 3))
        return answers

    assert {got.text for got in run(work())} == {"champion"}
    assert split.count("challenger") == {"failed": 3} and compared(split) == {"not_comparable": 3}


def test_only_the_share_is_copied():
    split = shadow(Answering("challenger"), percent=30.0)

    async def work():
        for number in range(60):
            await split.ask(headers={"x-request-id": str(number)})
        chosen = sum(split.traffic.trial.settings.is_chosen(str(number)) for number in range(60))
        await until(settled(split, chosen))
        return chosen

    chosen = run(work())
    assert 5 < chosen < 35 and len(split.challenger.asked) == chosen


def test_the_copy_starts_after_the_champions_answer_began():
    """Before that it would take the champion's share of the machine."""

    async def work():
        champion = Answering("champion")
        champion.release = asyncio.Event()
        split = shadow(Answering("challenger"), champion=champion)
        asking = asyncio.ensure_future(split.ask())
        await asyncio.sleep(0.05)
        before = len(split.challenger.asked)
        champion.release.set()
        await asking
        await until(settled(split, 1))
        return before, len(split.challenger.asked)

    assert run(work()) == (0, 1)


def test_a_champion_that_fails_leaves_no_copy_waiting():
    split = shadow(Answering("challenger"), champion=Answering("champion", fail_after=0))

    async def work():
        tasks = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="champion fails"):
            await split.ask()
        await asyncio.sleep(0.02)
        return asyncio.all_tasks() - tasks

    assert run(work()) == set()
    assert split.challenger.asked == [] and split.count("champion") == {"failed": 1}


def test_the_end_of_a_trial_ends_its_copies():
    async def work():
        tasks = asyncio.all_tasks()
        split = shadow(Answering("challenger", wait=100.0))
        await split.ask()
        await until(lambda: split.challenger.asked)
        await asyncio.to_thread(split.traffic.configure, {})
        await until(lambda: asyncio.all_tasks() == tasks)
        return split.challenger.num_cancelled

    assert run(work()) == 1


def test_embeddings_and_predictions_are_compared_by_number():
    body = [json.dumps({"data": [{"embedding": [1.0, 0.0]}]}).encode()]
    near = [json.dumps({"data": [{"embedding": [0.6, 0.8]}]}).encode()]
    split = shadow(Answering("challenger", chunks=near), champion=Answering("champion", chunks=body))

    async def work():
        await ask(split.app, {"model": "tiny", "input": "a"}, path="/v1/embeddings")
        await until(lambda: split.traffic.report()["copies"]["num_cosines"])
        return measured(read_evidence(split.traffic.report()["evidence"]))

    assert run(work())["min_cosine"] == pytest.approx(0.6)

    rows = [[json.dumps({"outputs": {"y": value}}).encode()] for value in ([1.0, 2.0], [1.0, 2.25])]
    split = shadow(Answering("challenger", chunks=rows[1]), champion=Answering("champion", chunks=rows[0]))

    async def predict():
        await ask(split.app, np.ones(3).tobytes(), path="/v1/predict")
        await until(lambda: split.traffic.report()["copies"]["max_abs_error"] is not None)
        return measured(read_evidence(split.traffic.report()["evidence"]))

    assert run(predict())["max_abs_error"] == 0.25
    families = {family.name: family for family in text_string_to_metric_families(split.traffic.render())}
    assert {sample.labels["result"] for sample in families["traffic_copies"].samples} == {
        *("equal", "different", "not_comparable", "dropped")
    }
