"""A server somewhere else, as an ASGI application.

Owns the way of one request to another address and back. Knows nothing of trials. The one decision: whatever is said
arrives as it is said, chunk by chunk, and a client that goes away here goes away there.
"""

import asyncio
from collections.abc import Iterable

import aiohttp
from starlette.types import Receive, Scope, Send

CONNECT_SECONDS = 2.0
CHUNK_BYTES = 64 * 2**10
_NOT_PASSED_ON = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host")
)
"""Of one connection, not of the request (RFC 9110, section 7.6.1)."""
Headers = list[tuple[bytes, bytes]]


class RemoteFailed(Exception):  # noqa: N818 - a state of the other server
    """The other server could not be asked, or broke off."""


class RemoteApp:
    """The server at `url`."""

    def __init__(self, url: str) -> None:
        """`url` without `/v1`; the path of each request is put behind it."""
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI.

        Raises:
            RemoteFailed: no connection, no answer, or the answer ended early.
        """
        body = await _body(receive)
        if body is None:
            return
        asked = asyncio.create_task(self._ask(scope, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await asked
        finally:
            # Cancelling closes the connection, which is how the other server learns of it.
            for task in (asked, gone):
                task.cancel()
            await asyncio.gather(asked, gone, return_exceptions=True)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, scope: Scope, body: bytes, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        query = scope.get("query_string", b"").decode("latin-1")
        url = f"{self._url}{path}{'?' + query if query else ''}"
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _passed_on(scope["headers"])]
        try:
            async with self._connected().request(scope["method"], url, data=body, headers=headers) as answer:
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status,
                        "headers": _passed_on((name.lower(), value) for name, value in answer.raw_headers),
                    }
                )
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, OSError) as error:
            raise RemoteFailed(f"{url}: {type(error).__name__}: {error}") from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                # A kept connection may be closed by the other side at the moment of use, which would look like a
                # failure of the challenger; a new one costs 0.2 ms on one machine.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                auto_decompress=False,
                read_bufsize=CHUNK_BYTES,
            )
        return self._session


async def _body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name, value) for name, value in headers if name not in _NOT_PASSED_ON]
