"""The pure parts of `pipeline bench serve`, its client, and the processes of its sides."""

import ast
import asyncio
import dataclasses
import importlib.util
import json
import threading
from pathlib import Path

import pytest

from pipeline.diagnostics import bench_serve_side
from pipeline.diagnostics.bench_result import BenchRow
from pipeline.diagnostics.bench_serve import GROUPS, chosen
from pipeline.diagnostics.bench_serve_side import SIDES, Side
from pipeline.diagnostics.bench_serve_traffic import (
    Arrival,
    Seen,
    percentile,
    poisson_arrivals,
    replay,
    summarize,
)
from pipeline.diagnostics.bench_turns import RowSpec, make_row, take_turns
from pipeline.errors import StageError, UsageError

ROW = RowSpec(name="decode", unit="tokens/s", metric="rate", peers={"peer": "theirs"}, bar=2.0)
MEAN_TOLERANCE = 0.1
"""Standard error of the mean of 2,000 exponential gaps: 2.2 %."""


def row(**changes):
    fields = {"name": "r", "unit": "s", "ours": 2.0, "peer_name": "p", "peer": 6.0, "bar": 2.0}
    return BenchRow(**(fields | changes))


def test_gaps_are_exponential_with_the_asked_mean_and_lengths_keep_to_their_ranges():
    arrivals = poisson_arrivals(2000, per_second=5.0, prompt_tokens=(8, 96), new_tokens=(4, 24), seed=0)
    times = [item.at_seconds for item in arrivals]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=MEAN_TOLERANCE)
    # An exponential variable exceeds its mean with probability 1/e.
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, rel=MEAN_TOLERANCE)
    assert {len(item.prompt) for item in arrivals} == set(range(8, 97))
    assert {item.max_tokens for item in arrivals} == set(range(4, 25))


def test_a_schedule_comes_back_from_its_seed():
    same = [poisson_arrivals(5, per_second=1.0, prompt_tokens=(2, 4), new_tokens=(1, 2), seed=7) for _ in range(2)]
    other = poisson_arrivals(5, per_second=1.0, prompt_tokens=(2, 4), new_tokens=(1, 2), seed=8)
    assert same[0] == same[1] != other


def test_the_percentile_is_a_value_that_was_seen():
    assert percentile([float(value) for value in range(1, 201)], 99) == 198.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([4.0], 99) == 4.0


def test_throughput_counts_from_the_first_arrival_to_the_last_answer():
    arrivals = [Arrival(at_seconds=at, prompt=(1,), max_tokens=9) for at in (1.0, 2.0)]
    seen = [
        Seen(first_seconds=0.5, end_seconds=4.0, num_tokens=9),
        Seen(first_seconds=0.1, end_seconds=1.0, num_tokens=3),
    ]
    assert summarize(seen, arrivals=arrivals) == {"tokens_per_second": 12 / 4, "p99_first_seconds": 0.5}


@pytest.mark.parametrize(
    ("made", "ratio", "ok"),
    [
        (row(), 1 / 3, False),
        (row(is_smaller_better=True), 3.0, True),
        (row(is_smaller_better=True, bar=3.5), 3.0, False),
        (row(bar=None), 1 / 3, True),
        (row(peer=None), None, False),
        (row(ours=None, bar=None), None, False),
    ],
)
def test_a_row_is_judged_by_its_ratio(made, ratio, ok):
    assert (made.ratio, made.ok) == (pytest.approx(ratio) if ratio else None, ok)


def test_sides_take_turns_and_the_first_round_does_not_count():
    asked = []

    def side(name):
        return lambda number: asked.append((name, number)) or {"rate": float(number)}

    measured = take_turns({"ours": side("ours"), "peer": side("peer")}, rounds=2)
    assert asked == [("peer", 0), ("ours", 0), ("ours", 1), ("peer", 1), ("peer", 2), ("ours", 2)]
    assert measured == {"ours": [{"rate": 1.0}, {"rate": 2.0}], "peer": [{"rate": 1.0}, {"rate": 2.0}]}


def test_after_its_time_a_group_begins_no_round_but_one_is_measured():
    now = iter(float(minute) for minute in range(0, 600, 60))
    measured = take_turns(
        {"ours": lambda number: {"rate": float(number)}}, rounds=5, most_seconds=90.0, clock=lambda: next(now)
    )
    # Asked before the second and third measured round: after 60 and 120 s.
    assert measured == {"ours": [{"rate": 1.0}, {"rate": 2.0}]}


def test_a_side_that_fails_takes_only_its_rows_with_it():
    calls = []

    def broken(number):
        calls.append(number)
        raise StageError("llama_cpp: no such module")

    measured = take_turns({"ours": lambda _: {"rate": 9.0}, "peer": broken, "other": lambda _: {"rate": 3.0}}, rounds=3)
    assert calls == [0]
    failed = make_row(ROW, measured=measured)
    assert (failed.ours, failed.peer, failed.ratio, failed.ok) == (9.0, None, None, False)
    assert failed.note == "peer: llama_cpp: no such module"
    assert make_row(dataclasses.replace(ROW, peers={"other": "theirs"}), measured=measured).ok


def test_without_ours_a_row_says_why():
    made = make_row(ROW, measured={"ours": "ours: no device", "peer": [{"rate": 1.0}]})
    assert (made.ours, made.ok, made.note) == (None, False, "ours: ours: no device")


def test_the_round_of_the_median_ratio_counts():
    rates = {"ours": (10.0, 40.0, 90.0), "peer": (10.0, 10.0, 30.0)}
    made = make_row(ROW, measured={name: [{"rate": rate} for rate in found] for name, found in rates.items()})
    assert (made.ours, made.peer, made.ratio) == (90.0, 30.0, 3.0)


def test_of_several_peers_the_fastest_counts():
    spec = dataclasses.replace(ROW, peers={"slow": "padded", "fast": "batched", "gone": "third"})
    measured = {"ours": [{"rate": 30.0}], "slow": [{"rate": 10.0}], "fast": [{"rate": 20.0}], "gone": "ended"}
    made = make_row(spec, measured=measured)
    assert (made.peer_name, made.ratio, made.note) == ("batched", 1.5, "gone: ended")


def test_a_cost_is_held_against_what_is_allowed():
    spec = RowSpec(
        name="HTTP",
        unit="ms",
        metric="http",
        peer_metric="inside",
        peers={"ours": "allowed"},
        allowed=3.0,
        bar=1.0,
        is_smaller_better=True,
    )
    dear, cheap, none = ({"ours": [{"http": http, "inside": 20.0}]} for http in (24.0, 21.5, 19.0))
    assert (made := make_row(spec, measured=dear)).ours == 4.0 and not made.ok
    assert (made := make_row(spec, measured=cheap)).ours == 1.5 and made.ok
    assert make_row(spec, measured=none).ok


def test_groups_are_chosen_by_pattern_in_their_own_order():
    assert [group.name for group in chosen("prefill, decode-*")] == ["decode-1", "decode-8", "prefill"]
    assert chosen("") == GROUPS
    with pytest.raises(UsageError, match="decode-1, decode-8"):
        chosen("decode-9")


def test_every_row_has_a_name_of_its_own():
    names = [spec.name for group in GROUPS for spec in group.rows]
    assert len(set(names)) == len(names)


def test_every_side_is_defined_where_the_table_says():
    """Read, not imported: the sides load torch and jax, which never meet."""
    for dotted in SIDES.values():
        module, _, name = dotted.partition(":")
        tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, dotted


def test_a_side_that_cannot_load_answers_so(tmp_path):
    with (
        Side("onnxruntime", directory=tmp_path / "nothing", log=tmp_path / "log") as side,
        pytest.raises(StageError, match=r"onnxruntime: .*nothing"),
    ):
        side.ask("embed", timeout_seconds=60)


def test_a_side_that_dies_or_hangs_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    script = tmp_path / "side.py"
    script.write_text("import sys, time\nsys.stdin.readline()\nprint('out of memory', file=sys.stderr)\n")
    monkeypatch.setattr(bench_serve_side, "__spec__", dataclasses.make_dataclass("Spec", ["name"])("side"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Side("ours", directory=tmp_path, log=tmp_path / "log") as side,
        pytest.raises(StageError, match="ours ended: out of memory"),
    ):
        side.ask("anything", timeout_seconds=60)
    script.write_text("import time\ntime.sleep(60)\n")
    with Side("ours", directory=tmp_path, log=tmp_path / "log") as side:
        with pytest.raises(StageError, match="did not answer in time"):
            side.ask("anything", timeout_seconds=0.2)
        side._process.kill()


class Server:
    """Answers every connection with one text."""

    def __init__(self, answer):
        self.requests = []
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.requests.append(json.loads(await reader.readexactly(length)))
        writer.write(self._answer)
        await writer.drain()
        writer.close()

    def stop(self):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


@pytest.fixture
def serve():
    servers = []

    def made(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield made
    for server in servers:
        server.stop()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
ARRIVALS = [Arrival(at_seconds=at, prompt=(5, 6), max_tokens=2) for at in (0.0, 0.05)]


def test_the_client_reads_events_and_counts_the_tokens_of_the_usage(serve):
    events = b'data: {"choices": [{"text": "a"}], "usage": null}\n\ndata: {"usage": {"completion_tokens": 2}}\n\n'
    server = serve(HEAD + events + b"data: [DONE]\n\n")
    seen = replay(ARRIVALS, port=server.port, model="bench")
    assert [item.num_tokens for item in seen] == [2, 2]
    assert all(0 < item.first_seconds <= item.end_seconds for item in seen)
    assert server.requests[0]["prompt"] == [5, 6] and server.requests[0]["max_tokens"] == 2


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503"),
        (HEAD + b'data: {"choices": []}\n\n', "broke off"),
    ],
)
def test_a_refused_or_broken_answer_fails_the_side(serve, answer, match):
    with pytest.raises(StageError, match=match):
        replay(ARRIVALS, port=serve(answer).port, model="bench")
