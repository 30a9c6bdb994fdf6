"""A client's first requests to a deployment.

Owns the proof that an endpoint answers. Knows nothing of Ray or jax; it is an ordinary HTTP client. The one decision:
what is proven is what a client sees, through the same address and in two forms that must agree: plain and streamed
text, numbers and base64, JSON and `.npz`.
"""

import base64
import http.client
import io
import json
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from pipeline.errors import ClusterError, StageError

SMOKE_TOKENS = 16
SMOKE_ROWS = 2
SMOKE_TOLERANCE = 1e-4
"""The second answer may come from another batch size, whose sums are rounded in another order."""
CURL_NUMBERS = 256
"""More numbers than these are not shown as JSON."""
POLL_SECONDS = 0.1
ANSWERS_IN_A_ROW = 3
"""The ingress learns of replicas a moment after they run; until then an old one may answer in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeResult:
    """What came back."""

    shown: str
    """The text, or the answer in short."""
    count: int
    unit: Literal["tokens", "rows"]
    seconds: float
    """Of the first request."""
    curl: str
    """A request that a person can repeat."""


def wait_for_version(url: str, *, model: str, deployment_id: str, timeout_seconds: float) -> Mapping[str, Any]:
    """Ask `/health` until the deployed version of `model` answers; returns what it says of it.

    Raises:
        ClusterError: it does not in time; the message says what answered instead.
    """
    deadline = time.monotonic() + max(timeout_seconds, 1.0)
    in_a_row = 0
    while True:
        found, body = _health(url)
        body = body.get("models", {}).get(model, {})
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


def smoke(
    url: str, *, endpoint: str, model: str, prompt: str, timeout_seconds: float, api_key: str | None = None
) -> SmokeResult:
    """Ask what this endpoint answers, twice.

    Args:
        url: without `/v1`.
        endpoint: `chat`, `completions`, `embeddings` or `predict`.
        model: its name.
        prompt: of text.
        timeout_seconds: for each request.
        api_key: where the deployment needs one.

    Raises:
        StageError: a request brought an error or nothing, or the two answers differ.
    """
    server = _Server(url=url, timeout_seconds=timeout_seconds, api_key=api_key)
    if endpoint == "embeddings":
        return _smoke_embeddings(server, model=model, text=prompt)
    if endpoint == "predict":
        return _smoke_predict(server, model=model)
    return _smoke_text(server, model=model, prompt=prompt, is_chat=endpoint == "chat")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    """Who is asked."""

    url: str
    timeout_seconds: float
    api_key: str | None = field(repr=False)

    def post(self, endpoint: str, fields: Mapping[str, Any]) -> bytes:
        """Send JSON."""
        return self.send(endpoint, json.dumps(fields).encode(), media_type="application/json")

    def send(self, endpoint: str, body: bytes, *, media_type: str) -> bytes:
        """Send a body."""
        return self._answer(f"{self.url}/v1/{endpoint}", body=body, headers={"Content-Type": media_type})

    def get(self, path: str) -> bytes:
        """Read what is behind `/v1/`."""
        return self._answer(f"{self.url}/v1/{path}", body=None, headers={})

    def curl(self, endpoint: str, fields: Mapping[str, Any]) -> str:
        """The request as a person types it."""
        body = shlex.quote(json.dumps(fields, separators=(",", ":") if endpoint == "predict" else None))
        return f"curl {self.url}/v1/{endpoint}{self.curl_key} -H 'Content-Type: application/json' -d {body}"

    @property
    def curl_key(self) -> str:
        """Of `curl`, where a key is needed."""
        return "" if self.api_key is None else ' -H "Authorization: Bearer $API_KEY"'

    def _answer(self, url: str, *, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(url, data=body, headers={**headers, **key})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
                received: bytes = answer.read()
                return received
        except urllib.error.HTTPError as error:
            raise StageError(
                f"{url}: the smoke request got status {error.code}: {error.read()[:2000].decode()}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise StageError(f"{url}: the smoke request failed: {error}") from error


def _smoke_text(server: _Server, *, model: str, prompt: str, is_chat: bool) -> SmokeResult:
    endpoint = "chat/completions" if is_chat else "completions"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    fields = {"model": model, **asked, "max_tokens": SMOKE_TOKENS, "temperature": 0}
    started = time.monotonic()
    plain = json.loads(server.post(endpoint, fields))
    seconds = time.monotonic() - started
    choice, num_tokens = plain["choices"][0], plain["usage"]["completion_tokens"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    if num_tokens < 1:
        raise StageError(f"{server.url}/v1/{endpoint}: the smoke request brought no token: {plain}")
    events = server.post(endpoint, {**fields, "stream": True}).decode()
    streamed = _text_of(events)
    if "data: [DONE]" not in events or streamed != text:
        raise StageError(f"{server.url}/v1/{endpoint}: the streamed answer {streamed!r} is not the plain one {text!r}")
    curl = server.curl(endpoint, {"model": model, **asked, "max_tokens": 32})
    return SmokeResult(shown=text, count=num_tokens, unit="tokens", seconds=seconds, curl=curl)


def _smoke_embeddings(server: _Server, *, model: str, text: str) -> SmokeResult:
    fields = {"model": model, "input": text}
    started = time.monotonic()
    plain = json.loads(server.post("embeddings", fields))
    seconds = time.monotonic() - started
    packed = json.loads(server.post("embeddings", {**fields, "encoding_format": "base64"}))
    vector = np.asarray(plain["data"][0]["embedding"], np.float32)
    again = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    if not len(vector) or not np.allclose(vector, again, rtol=SMOKE_TOLERANCE, atol=SMOKE_TOLERANCE):
        raise StageError(
            f"{server.url}/v1/embeddings: the numbers {vector[:4]}... are not those in base64 {again[:4]}..."
        )
    shown = f"{len(vector)} numbers, {', '.join(f'{number:.4f}' for number in vector[:3])}, ..."
    num_tokens = plain["usage"]["prompt_tokens"]
    curl = server.curl("embeddings", fields)
    return SmokeResult(shown=shown, count=num_tokens, unit="tokens", seconds=seconds, curl=curl)


def _smoke_predict(server: _Server, *, model: str) -> SmokeResult:
    card = json.loads(server.get(f"models/{quote(model)}"))
    rng = np.random.default_rng(0)
    inputs = {
        name: _drawn(rng, (SMOKE_ROWS, *form["shape"][1:]), form["dtype"]) for name, form in card["inputs"].items()
    }
    fields = {"model": model, "inputs": {name: array.tolist() for name, array in inputs.items()}}
    started = time.monotonic()
    plain = json.loads(server.post("predict", fields))["outputs"]
    seconds = time.monotonic() - started
    file = io.BytesIO()
    named: dict[str, Any] = dict(inputs)
    np.savez(file, **named)
    answer = server.send(f"predict?model={quote(model)}", file.getvalue(), media_type="application/x-npz")
    with np.load(io.BytesIO(answer), allow_pickle=False) as arrays:
        again = {name: arrays[name] for name in arrays.files}
    differing = [
        name
        for name in plain
        if name not in again
        or not np.allclose(np.asarray(plain[name]), again[name], rtol=SMOKE_TOLERANCE, atol=SMOKE_TOLERANCE)
    ]
    if differing or not plain or any(len(rows) != SMOKE_ROWS for rows in plain.values()):
        raise StageError(
            f"{server.url}/v1/predict: the answers in JSON and .npz differ in {', '.join(differing) or 'their rows'}"
        )
    shown = ", ".join(f"{name} {list(np.asarray(rows).shape)}" for name, rows in plain.items())
    return SmokeResult(
        shown=shown, count=SMOKE_ROWS, unit="rows", seconds=seconds, curl=_predict_curl(server, card=card)
    )


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.random(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _predict_curl(server: _Server, *, card: Mapping[str, Any]) -> str:
    """A row of zeros, where it is short enough to read; else the files to send."""
    rows = {name: np.zeros((1, *form["shape"][1:]), form["dtype"]) for name, form in card["inputs"].items()}
    if sum(row.size for row in rows.values()) <= CURL_NUMBERS:
        # 0 is as good as 0.0 to the server, and shorter.
        zeros = {name: (row if row.dtype == bool else row.astype(int)).tolist() for name, row in rows.items()}
        return server.curl("predict", {"inputs": zeros})
    media_type = "-H 'Content-Type: application/x-npz'"
    return f"curl {server.url}/v1/predict{server.curl_key} {media_type} --data-binary @inputs.npz -o outputs.npz"


def _text_of(events: str) -> str:
    bodies = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for body in bodies for choice in json.loads(body).get("choices", ())]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def _health(url: str) -> tuple[str, Mapping[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}", {}
    return str(body), body if isinstance(body, dict) else {}
