"""What goes over the wire while the engine steps: one write a step, and nothing for a client that is gone."""

import asyncio
import json
import time
from dataclasses import replace

import httpx
import pytest
from loopback import listening
from stepped_engine import STEPPED_LIMITS, SteppedExecutor, stepped_engine
from tiny_llama import WAIT_SECONDS

from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.sampling_fields import ServedModel

TEMPLATE = ChatTemplate.of({"default": "{{ messages[0].content }}"}, special_tokens={}, where="test")
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "def"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "def"}]},
}


@pytest.fixture
def executor():
    return SteppedExecutor()


@pytest.fixture
def surface(executor, vocabulary, tokenizer):
    engine = stepped_engine(executor, vocabulary)
    yield make_surface(
        engine=engine,
        encoder=tokenizer,
        decoder=tokenizer,
        model=ServedModel(name="tiny", context=160, num_tokens=320, stop_ids=()),
        facts={},
        template=TEMPLATE,
    )
    executor.allow(1000)
    engine.stop(drain_seconds=5)


class Connection:
    """One request at the level of ASGI."""

    def __init__(self, surface, path, **fields):
        self.writes = asyncio.Queue()
        self.is_gone = asyncio.Event()
        self._messages = [{"type": "http.request", "body": json.dumps({**BODIES[path], **fields}).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "root_path": "",
        }
        self.task = asyncio.create_task(make_app(surface)(scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.start = message
        if message["type"] == "http.response.body" and message["body"]:
            self.writes.put_nowait(message["body"])

    async def write(self):
        return await asyncio.wait_for(self.writes.get(), WAIT_SECONDS)


@pytest.mark.parametrize("path", BODIES)
def test_a_step_that_moves_several_choices_is_one_write(surface, executor, path):
    async def go():
        connection = Connection(surface, path, stream=True, n=3, max_tokens=6, stream_options={"include_usage": True})
        executor.allow(3)  # the prompts
        while True:
            # Prompts are read one a step, with a decode of those that are there before it.
            executor.allow()
            write = await connection.write()
            if write.count(b"data: ") == 3 and connection.writes.empty():
                break
        before = executor.num_decodes
        executor.allow()
        write = await connection.write()
        assert executor.num_decodes == before + 1
        events = [json.loads(line.removeprefix("data: ")) for line in write.decode().split("\n\n") if line]
        assert sorted(event["choices"][0]["index"] for event in events) == [0, 1, 2]
        executor.allow(100)
        await asyncio.wait_for(connection.task, WAIT_SECONDS)
        last = b""
        while not connection.writes.empty():
            last = connection.writes.get_nowait()
        assert last.count(b"data: ") == 2 and b'"usage":{' in last and last.endswith(b"data: [DONE]\n\n")

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_is_gone_frees_its_slots_within_one_step(surface, executor, path, stream):
    async def go():
        connection = Connection(surface, path, stream=stream, n=3, max_tokens=100)
        executor.allow(3 + 4)
        while executor.num_decodes < 2:
            await asyncio.sleep(0.005)
        while surface.engine.status().num_running < 3:
            executor.allow()
            await asyncio.sleep(0.005)
        connection.is_gone.set()
        await asyncio.wait_for(connection.task, WAIT_SECONDS)
        # The step that is under way ends; whatever else it left to do is one more.
        before = executor.num_decodes
        while surface.engine.status().num_running:
            executor.allow()
            await asyncio.sleep(0.01)
        assert executor.num_decodes - before <= 2

    asyncio.run(go())
    assert surface.engine.why_unbalanced() is None
    assert surface.engine.metrics.value("aborted_requests_total", label="client") == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_socket_that_closes_frees_its_slot_too(surface, executor, stream):
    executor.allow(2)
    with listening(make_app(surface)) as url:
        fields = {**BODIES["/v1/completions"], "max_tokens": 100, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=WAIT_SECONDS) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=fields, timeout=0.3)
        deadline = time.monotonic() + WAIT_SECONDS
        while not surface.engine.metrics.value("aborted_requests_total", label="client"):
            executor.allow()
            time.sleep(0.01)
            assert time.monotonic() < deadline
    assert executor.num_decodes < 50
    assert surface.engine.why_unbalanced() is None


def test_a_full_queue_is_a_503_that_says_when_to_come_back(executor, surface, vocabulary):
    surface.engine = stepped_engine(executor, vocabulary, limits=replace(STEPPED_LIMITS, slots=1, max_waiting=1))

    async def go():
        first = Connection(surface, "/v1/completions", stream=True, max_tokens=100)
        executor.allow(2)
        await first.write()
        waiting = Connection(surface, "/v1/completions", stream=True, max_tokens=2)
        while not surface.engine.status().num_waiting:
            executor.allow()
            await asyncio.sleep(0.005)
        refused = Connection(surface, "/v1/completions", stream=True, max_tokens=2)
        body = json.loads(await refused.write())
        assert refused.start["status"] == 503 and (b"retry-after", b"1") in refused.start["headers"]
        assert "1 requests wait already" in body["error"]["message"]
        executor.allow(1000)
        for connection in (first, waiting):
            await asyncio.wait_for(connection.task, WAIT_SECONDS)
            assert connection.start["status"] == 200

    asyncio.run(go())
    surface.engine.stop(drain_seconds=5)


def test_a_slow_client_gets_what_several_steps_brought_in_one_write(surface, executor):
    async def go():
        connection = Connection(surface, "/v1/completions", stream=True, max_tokens=20)
        executor.allow(2)
        await connection.write()
        executor.allow(3)
        deadline = time.monotonic() + WAIT_SECONDS
        while executor.num_decodes < 4 and time.monotonic() < deadline:
            time.sleep(0.005)  # the loop, which writes, is held up
        await connection.write()
        await asyncio.sleep(0.05)
        assert connection.writes.qsize() <= 1
        executor.allow(100)
        await asyncio.wait_for(connection.task, WAIT_SECONDS)

    asyncio.run(go())
