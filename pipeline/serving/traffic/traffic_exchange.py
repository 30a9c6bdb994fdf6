"""One request and its answer as ASGI messages, watched, held back or given again.

Owns the wrappers around `receive` and `send`. Knows nothing of trials beyond what an arm's outcome is. The one
decision: an answer that breaks off, says 500 or carries an error event failed; a client that went away says nothing.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from pipeline.serving.traffic.traffic_window import Arm, Outcome, Window

ERROR_EVENT = b'data: {"error"'
"""How a stream says that it failed after its status was sent."""
MAX_BODY_BYTES = 4 * 2**20
"""A longer request or answer is neither forwarded nor compared."""
ARM_HEADER = b"x-served-by"


class Recorded:
    """An answer on its way to the client (or to nobody), timed."""

    def __init__(
        self,
        send: Send | None,
        *,
        arm: Arm,
        keeps_body: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` is None where no client gets the answer; its body is kept where it will be compared."""
        self.status = 0
        self.is_complete = False
        self.has_error_event = False
        self.started = asyncio.Event()
        """Set when the answer begins."""
        self._send = send
        self._arm = arm
        self._clock = clock
        self._began_at = clock()
        self._first_byte_at: float | None = None
        self._parts: list[bytes] | None = [] if keeps_body else None
        self._num_bytes = 0

    @property
    def body(self) -> bytes | None:
        """All of it; None where it is not kept or was too long."""
        return None if self._parts is None else b"".join(self._parts)

    async def send(self, message: Message) -> None:
        """As ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (ARM_HEADER, self._arm.value.encode())]
            message = {**message, "headers": headers}
            self.started.set()
        elif message["type"] == "http.response.body":
            self._take(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        if self._send is not None:
            await self._send(message)

    @property
    def is_refusal(self) -> bool:
        """True where the client is to blame, as this arm sees it."""
        return 400 <= self.status < 500

    def count(self, window: Window, *, is_gone: bool, outcome: Outcome | None = None) -> None:
        """Put the outcome into the window; by what was seen, where it is not given."""
        now = self._clock()
        first = now if self._first_byte_at is None else self._first_byte_at
        window.record(
            self._arm,
            outcome or self._outcome(is_gone=is_gone),
            ttft_ms=1000 * (first - self._began_at),
            latency_ms=1000 * (now - self._began_at),
        )

    def _outcome(self, *, is_gone: bool) -> Outcome:
        if is_gone and not self.is_complete:
            return Outcome.GONE
        if not self.is_complete or self.status >= 500 or self.has_error_event:
            return Outcome.FAILED
        return Outcome.REFUSED if self.is_refusal else Outcome.ANSWERED

    def _take(self, body: bytes) -> None:
        if not body:
            return
        if self._first_byte_at is None:
            self._first_byte_at = self._clock()
        self.has_error_event |= ERROR_EVENT in body
        self._num_bytes += len(body)
        if self._num_bytes > MAX_BODY_BYTES:
            self._parts = None
        if self._parts is not None:
            self._parts.append(body)


class Held:
    """Keeps an answer back until it has a first byte of a status below 400; another one is never sent."""

    def __init__(self, send: Send) -> None:
        self.is_decided = asyncio.Event()
        self.is_let_through = False
        self._send = send
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        """As ASGI's `send`."""
        if self.is_let_through:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            self._start = message
            if message["status"] >= 400:
                self.is_decided.set()
            return
        has_content = bool(message.get("body", b"")) or not message.get("more_body", False)
        if self._start is None or self._start["status"] >= 400 or not has_content:
            return
        self.is_let_through = True
        self.is_decided.set()
        await self._send(self._start)
        await self._send(message)


class Incoming:
    """A request whose body was read, to be given as often as needed."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body = body
        self.is_gone = False
        self._receive = receive

    def again(self) -> Receive:
        """A `receive` that gives the body first, and then waits for the client to go away."""
        is_given = False

        async def receive() -> Message:
            nonlocal is_given
            if not is_given:
                is_given = True
                return {"type": "http.request", "body": self.body, "more_body": False}
            if self.is_gone:
                return {"type": "http.disconnect"}
            message = await self._receive()
            self.is_gone |= message["type"] == "http.disconnect"
            return message

        return receive

    def detached(self) -> Receive:
        """Likewise, for an answer that no client waits for."""
        is_given = False

        async def receive() -> Message:
            nonlocal is_given
            if is_given:
                await asyncio.Event().wait()
            is_given = True
            return {"type": "http.request", "body": self.body, "more_body": False}

        return receive


async def read_incoming(scope: Scope, receive: Receive) -> "Incoming | Receive":
    """The whole request; or a `receive` that gives all of it, where it is too long to keep or the client went away."""
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        return receive
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or size > MAX_BODY_BYTES:
            return _chained(messages, receive)
        if not message.get("more_body", False):
            return Incoming(b"".join(message.get("body", b"") for message in messages), receive)


def _chained(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def give() -> Message:
        return next(left, None) or await receive()

    return give
