"""A request to another server arrives whole, and so does its answer, chunk by chunk."""

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from traffic_apps import GREEDY, Answering, Got, ask

from pipeline.serving.traffic.traffic_remote import RemoteApp, RemoteFailed


@contextlib.asynccontextmanager
async def listening(app):
    """The application behind a real socket."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.005)
        remote = RemoteApp(f"http://127.0.0.1:{bound.getsockname()[1]}/prefix")
        try:
            yield remote
        finally:
            await remote.close()
            server.should_exit = True
            await serving


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def test_path_query_headers_and_body_arrive_and_the_answer_comes_back():
    there = Answering("there", status=201, headers=[(b"x-limit", b"3")])

    async def work():
        async with listening(there) as remote:
            headers = {"authorization": "Bearer k", "connection": "close", "host": "here", "x-session-id": "s"}
            return await ask(remote, path="/v1/chat/completions", headers=headers)

    got = run(work())
    assert (got.status, got.text, got.is_whole) == (201, "there", True)
    assert got.headers[b"x-limit"] == b"3" and b"transfer-encoding" not in got.headers
    ((path, body, headers),) = there.asked
    assert path == "/prefix/v1/chat/completions" and json.loads(body) == GREEDY
    assert headers[b"authorization"] == b"Bearer k" and headers[b"x-session-id"] == b"s"
    assert headers[b"host"].startswith(b"127.0.0.1")


def test_a_stream_comes_as_it_is_made():
    async def work():
        seen = asyncio.Event()

        async def there(scope, receive, send):
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"data: 1\n\n", b"data: 2\n\n"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.wait_for(seen.wait(), 5)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        class Client(Got):
            async def send(self, message):
                await super().send(message)
                if self.parts:
                    seen.set()

        client = Client()
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive():
            return next(messages, None) or await asyncio.Event().wait()

        async with listening(there) as remote:
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
            await remote(scope, receive, client.send)
        return client

    client = run(work())
    assert client.parts == [b"data: 1\n\n", b"data: 2\n\n"] and client.is_whole


def test_a_client_that_goes_away_here_goes_away_there():
    async def work():
        there = Answering("there")
        there.release = asyncio.Event()
        async with listening(there) as remote:
            gone = asyncio.Event()
            asking = asyncio.ensure_future(ask(remote, gone=gone))
            while not there.asked:
                await asyncio.sleep(0.005)
            gone.set()
            await asking
            async with asyncio.timeout(5):
                while not there.num_gone:
                    await asyncio.sleep(0.005)
        return there.num_gone

    assert run(work()) == 1


@pytest.mark.parametrize("fail_after", [1, 2])
def test_a_server_that_breaks_off_raises(fail_after):
    async def work():
        async with listening(Answering("there", chunks=[b"one", b"two", b"three"], fail_after=fail_after)) as remote:
            with pytest.raises(RemoteFailed, match="Error"):
                await ask(remote)

    run(work())


def test_a_server_that_is_not_there_raises():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        remote = RemoteApp(f"http://127.0.0.1:{taken.getsockname()[1]}")

        async def work():
            with pytest.raises(RemoteFailed, match="ClientConnectorError"):
                await ask(remote)
            await remote.close()

        run(work())
