"""A client's first requests to a deployment.

Owns the proof that an endpoint answers with text. Knows nothing of Ray or jax; it is an ordinary HTTP client. The one
decision: what is proven is what a client sees, through the same address, plain and streamed.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ClusterError, StageError

SMOKE_TOKENS = 16
POLL_SECONDS = 0.1
ANSWERS_IN_A_ROW = 3
"""The ingress learns of replicas a moment after they run; until then an old one may answer in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeResult:
    """What came back."""

    text: str
    num_tokens: int
    seconds: float
    """Of the plain request."""


def wait_for_version(url: str, *, deployment_id: str, timeout_seconds: float) -> Mapping[str, Any]:
    """Ask `/health` until the deployed version answers; returns its body.

    Raises:
        ClusterError: it does not in time; the message says what answered instead.
    """
    deadline = time.monotonic() + max(timeout_seconds, 1.0)
    in_a_row = 0
    while True:
        found, body = _health(url)
        in_a_row = in_a_row + 1 if body.get("deployment_id") == deployment_id else 0
        if in_a_row >= ANSWERS_IN_A_ROW:
            return body
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{url}/health: the new version does not answer; found {found}",
                hint="the replica runs, so look at the ingress: Ray's log directory, serve/",
            )
        if not in_a_row:
            time.sleep(POLL_SECONDS)


def smoke(url: str, *, model: str, prompt: str, timeout_seconds: float) -> SmokeResult:
    """Send a completion, plain and then streamed.

    Raises:
        StageError: either brought an error, no tokens, or the streamed text is not the plain one.
    """
    fields = {"model": model, "prompt": prompt, "max_tokens": SMOKE_TOKENS, "temperature": 0}
    started = time.monotonic()
    plain = json.loads(_post(url, fields, timeout_seconds=timeout_seconds))
    seconds = time.monotonic() - started
    text, num_tokens = plain["choices"][0]["text"], plain["usage"]["completion_tokens"]
    if num_tokens < 1:
        raise StageError(f"{url}/v1/completions: the smoke request brought no token: {plain}")
    events = _post(url, {**fields, "stream": True}, timeout_seconds=timeout_seconds).decode()
    streamed = _text_of(events)
    if "data: [DONE]" not in events or streamed != text:
        raise StageError(
            f"{url}/v1/completions: the streamed answer {streamed!r} is not the plain one {text!r}",
        )
    return SmokeResult(text=text, num_tokens=num_tokens, seconds=seconds)


def _text_of(events: str) -> str:
    bodies = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for body in bodies for choice in json.loads(body).get("choices", ()))


def _health(url: str) -> tuple[str, Mapping[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}", {}
    return str(body), body if isinstance(body, dict) else {}


def _post(url: str, fields: Mapping[str, Any], *, timeout_seconds: float) -> bytes:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(fields).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise StageError(
            f"{url}/v1/completions: the smoke request got status {error.code}: {error.read()[:2000].decode()}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise StageError(f"{url}/v1/completions: the smoke request failed: {error}") from error
