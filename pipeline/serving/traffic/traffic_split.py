"""Requests between a champion and a challenger, inside the process that serves the champion.

Owns which arm a request goes to, what happens when the challenger does not answer, and the copies of a shadow trial.
Knows nothing of jax or Ray. The one decision: the champion answers for the challenger: whatever goes wrong before the
challenger's first byte, the client gets the champion's answer, and the challenger gets the blame.
"""

import asyncio
import contextlib
import functools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.serving.traffic.traffic_exchange import Held, Incoming, Recorded, read_incoming
from pipeline.serving.traffic.traffic_remote import RemoteApp, RemoteFailed
from pipeline.serving.traffic.traffic_settings import TrafficSettings, read_traffic
from pipeline.serving.traffic.traffic_shadow import Copies, Copy
from pipeline.serving.traffic.traffic_window import Arm, Outcome, Window, evidence_as_json, render

_LOG = logging.getLogger(__name__)
REQUEST_HEADER = "x-request-id"
TRAFFIC_PATH = "/traffic"
_WORK_PREFIX = "/v1/"
_BYTES_AT_ONCE = 64 * 2**10
"""JSON of this size is read in about 1 ms."""


class _Trial:
    """One trial in this process."""

    def __init__(self, settings: TrafficSettings, challenger: ASGIApp) -> None:
        self.settings = settings
        self.challenger = challenger
        self.window = Window(counts_copies=settings.mode == "shadow")
        self.copies = Copies(settings, challenger, window=self.window) if settings.mode == "shadow" else None
        self._num_running = 0
        self._is_over = False

    async def __aenter__(self) -> "_Trial":
        self._num_running += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._num_running -= 1
        if self._is_over and not self._num_running:
            await self._close()

    async def end(self) -> None:
        """Nothing new; what runs goes on to its end."""
        self._is_over = True
        if not self._num_running:
            await self._close()

    async def _close(self) -> None:
        if self.copies is not None:
            await self.copies.close()
        if isinstance(self.challenger, RemoteApp):
            await self.challenger.close()


class Traffic:
    """The trial of a process, if there is one; may change while requests run. Thread-safe."""

    def __init__(
        self, *, make_challenger: Callable[[str], ASGIApp] = RemoteApp, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`make_challenger` gives the application at an address."""
        self._make_challenger = make_challenger
        self._clock = clock
        self._lease_until = 0.0
        self._lock = threading.Lock()
        self._trial: _Trial | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def trial(self) -> _Trial | None:
        """What runs now; None once nobody asks for its report any more."""
        trial = self._trial
        if trial is not None and self._clock() > self._lease_until:
            _LOG.error("nobody judges the trial of %r any more; the champion gets everything", trial.settings.model)
            self._change(None, only=trial)
            return None
        return trial

    def configure(self, given: Mapping[str, Any]) -> None:
        """Begin the trial, change its share, or end it where `given` is empty. What was counted stays with its trial.

        Raises:
            ParameterError: this is no value of `TrafficSettings`.
        """
        self._change(read_traffic(given))

    def _change(self, settings: TrafficSettings | None, *, only: _Trial | None = None) -> None:
        """To another trial or to none; with `only`, where that one still runs."""
        with self._lock:
            old = self._trial
            if (only is not None and old is not only) or (old is not None and settings == old.settings):
                return
            self._trial = None if settings is None else _Trial(settings, self._make_challenger(settings.challenger_url))
            self._lease_until = self._clock() + (0.0 if settings is None else settings.lease_seconds)
        if old is not None and self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(old.end(), self._loop)

    def judged(self) -> dict[str, Any]:
        """`report`, for whoever judges the trial: it goes on for another `lease_seconds`."""
        trial = self.trial
        if trial is not None:
            self._lease_until = self._clock() + trial.settings.lease_seconds
        return self.report()

    def report(self) -> dict[str, Any]:
        """What was counted, as JSON; `trial` is None without a trial."""
        trial = self.trial
        if trial is None:
            return {"trial": None}
        return {
            "trial": trial.settings.as_json(),
            **trial.window.summary(),
            "evidence": evidence_as_json(trial.window.evidence()),
        }

    def render(self) -> str:
        """Prometheus text of the trial; empty without one."""
        trial = self.trial
        return render(None if trial is None else trial.window)

    def on_loop(self) -> None:
        """Remember the loop that serves; where a trial is ended later."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()


class TrafficSplit:
    """ASGI middleware before the champion's application; belongs behind the check of keys."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._traffic.on_loop()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        trial = self._traffic.trial
        if path == TRAFFIC_PATH and scope["method"] == "GET":
            report = self._traffic.report()
            report.pop("evidence", None)
            await JSONResponse(report)(scope, receive, send)
        elif trial is None or scope["method"] != "POST" or not path.startswith(_WORK_PREFIX):
            await self._app(scope, receive, send)
        else:
            async with trial:
                await self._in_trial(trial, scope, receive, send)

    async def _in_trial(self, trial: _Trial, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = await read_incoming(scope, receive)
        if not isinstance(incoming, Incoming):
            await self._app(scope, incoming, send)
            return
        asks = functools.partial(_asks_for, trial.settings.model, scope.get("query_string", b""), incoming.body)
        if not (asks() if len(incoming.body) <= _BYTES_AT_ONCE else await asyncio.to_thread(asks)):
            await self._app(scope, incoming.again(), send)
            return
        is_chosen = trial.settings.is_chosen(_key(scope, trial.settings))
        if trial.copies is not None:
            await self._ask_champion(trial, scope, incoming, send, copies=trial.copies if is_chosen else None)
        elif not is_chosen:
            await self._ask_champion(trial, scope, incoming, send)
        else:
            await self._ask_challenger_first(trial, scope, incoming, send)

    async def _ask_champion(
        self, trial: _Trial, scope: Scope, incoming: Incoming, send: Send, *, copies: Copies | None = None
    ) -> Recorded:
        recorded = Recorded(send, arm=Arm.CHAMPION, keeps_body=copies is not None)
        copy = Copy(scope=scope, incoming=incoming, champion=recorded)
        try:
            with contextlib.nullcontext() if copies is None else copies.follow(copy):
                await self._app(_own(scope), incoming.again(), recorded.send)
        finally:
            recorded.count(trial.window, is_gone=incoming.is_gone)
        return recorded

    async def _ask_challenger_first(self, trial: _Trial, scope: Scope, incoming: Incoming, send: Send) -> None:
        held = Held(send)
        challenger = Recorded(held.send, arm=Arm.CHALLENGER)
        await _ask_challenger(trial, scope, incoming, challenger, held)
        if held.is_let_through or incoming.is_gone:
            return
        outcome = Outcome.FAILED
        try:
            champion = await self._ask_champion(trial, scope, incoming, send)
            # Only what the champion answers was the challenger's to answer.
            if challenger.is_refusal and champion.is_refusal:
                outcome = Outcome.REFUSED
        finally:
            challenger.count(trial.window, is_gone=False, outcome=outcome)
            if outcome is Outcome.FAILED:
                trial.window.fall_back()


async def _ask_challenger(trial: _Trial, scope: Scope, incoming: Incoming, challenger: Recorded, held: Held) -> None:
    """Give the client its answer, or nothing where it does not begin well; count it where that is settled."""
    answering = asyncio.ensure_future(trial.challenger(_own(scope), incoming.again(), challenger.send))
    deciding = asyncio.ensure_future(held.is_decided.wait())
    try:
        await asyncio.wait(
            (answering, deciding), timeout=trial.settings.first_byte_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if held.is_let_through:
            await answering
        elif not incoming.is_gone:
            _LOG.warning("the challenger gave no answer (%s); the champion answers", _why_not(answering, challenger))
    finally:
        for task in (answering, deciding):
            task.cancel()
        await asyncio.gather(answering, deciding, return_exceptions=True)
        if held.is_let_through or incoming.is_gone:
            challenger.count(trial.window, is_gone=incoming.is_gone)


def _why_not(answering: "asyncio.Future[None]", recorded: Recorded) -> str:
    if recorded.status >= 400:
        return f"status {recorded.status}"
    if not answering.done():
        return "no first byte in time"
    error = answering.exception()
    if error is not None and not isinstance(error, RemoteFailed):
        return f"{type(error).__name__}: {error}"
    return str(error) if error is not None else "it said nothing"


def _own(scope: Scope) -> Scope:
    """A scope that an application may change without the other arm's seeing it."""
    return {**scope, "state": dict(scope.get("state", {}))}


def _key(scope: Scope, settings: TrafficSettings) -> str:
    headers = Headers(scope=scope)
    return headers.get(settings.session_header) or headers.get(REQUEST_HEADER) or uuid.uuid4().hex


def _asks_for(model: str, query: bytes, body: bytes) -> bool:
    """True where the body or, for arrays, the query names the model, or neither names one."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    named = fields.get("model") if isinstance(fields, dict) else QueryParams(query).get("model")
    return named is None or named == model
