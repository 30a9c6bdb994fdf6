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
from dataclasses import dataclass
from typing import Any, Literal

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


def smoke(url: str, *, endpoint: str, model: str, prompt: str, timeout_seconds: float) -> SmokeResult:
    """Ask what this endpoint answers, twice.

    Args:
        url: without `/v1`.
        endpoint: `completions`, `embeddings` or `predict`, as `/health` says.
        model: its name.
        prompt: of text.
        timeout_seconds: for each request.

    Raises:
        StageError: a request brought an error or nothing, or the two answers differ.
    """
    if endpoint == "embeddings":
        return _smoke_embeddings(url, model=model, text=prompt, timeout_seconds=timeout_seconds)
    if endpoint == "predict":
        return _smoke_predict(url, model=model, timeout_seconds=timeout_seconds)
    return _smoke_completions(url, model=model, prompt=prompt, timeout_seconds=timeout_seconds)


def _smoke_completions(url: str, *, model: str, prompt: str, timeout_seconds: float) -> SmokeResult:
    fields = {"model": model, "prompt": prompt, "max_tokens": SMOKE_TOKENS, "temperature": 0}
    started = time.monotonic()
    plain = json.loads(_post(url, "completions", fields, timeout_seconds=timeout_seconds))
    seconds = time.monotonic() - started
    text, num_tokens = plain["choices"][0]["text"], plain["usage"]["completion_tokens"]
    if num_tokens < 1:
        raise StageError(f"{url}/v1/completions: the smoke request brought no token: {plain}")
    events = _post(url, "completions", {**fields, "stream": True}, timeout_seconds=timeout_seconds).decode()
    streamed = _text_of(events)
    if "data: [DONE]" not in events or streamed != text:
        raise StageError(
            f"{url}/v1/completions: the streamed answer {streamed!r} is not the plain one {text!r}",
        )
    curl = _curl(url, "completions", {"model": model, "prompt": prompt, "max_tokens": 32})
    return SmokeResult(shown=text, count=num_tokens, unit="tokens", seconds=seconds, curl=curl)


def _smoke_embeddings(url: str, *, model: str, text: str, timeout_seconds: float) -> SmokeResult:
    fields = {"model": model, "input": text}
    started = time.monotonic()
    plain = json.loads(_post(url, "embeddings", fields, timeout_seconds=timeout_seconds))
    seconds = time.monotonic() - started
    packed = json.loads(
        _post(url, "embeddings", {**fields, "encoding_format": "base64"}, timeout_seconds=timeout_seconds)
    )
    vector = np.asarray(plain["data"][0]["embedding"], np.float32)
    again = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    if not len(vector) or not np.allclose(vector, again, rtol=SMOKE_TOLERANCE, atol=SMOKE_TOLERANCE):
        raise StageError(f"{url}/v1/embeddings: the numbers {vector[:4]}... are not those in base64 {again[:4]}...")
    shown = f"{len(vector)} numbers, {', '.join(f'{number:.4f}' for number in vector[:3])}, ..."
    num_tokens = plain["usage"]["prompt_tokens"]
    curl = _curl(url, "embeddings", fields)
    return SmokeResult(shown=shown, count=num_tokens, unit="tokens", seconds=seconds, curl=curl)


def _smoke_predict(url: str, *, model: str, timeout_seconds: float) -> SmokeResult:
    card = json.loads(_get(f"{url}/v1/models/{model}", timeout_seconds=timeout_seconds))
    rng = np.random.default_rng(0)
    inputs = {
        name: _drawn(rng, (SMOKE_ROWS, *form["shape"][1:]), form["dtype"]) for name, form in card["inputs"].items()
    }
    fields = {"model": model, "inputs": {name: array.tolist() for name, array in inputs.items()}}
    started = time.monotonic()
    plain = json.loads(_post(url, "predict", fields, timeout_seconds=timeout_seconds))["outputs"]
    seconds = time.monotonic() - started
    file = io.BytesIO()
    named: dict[str, Any] = dict(inputs)
    np.savez(file, **named)
    answer = _send(url, "predict", file.getvalue(), media_type="application/x-npz", timeout_seconds=timeout_seconds)
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
            f"{url}/v1/predict: the answers in JSON and .npz differ in {', '.join(differing) or 'their rows'}"
        )
    shown = ", ".join(f"{name} {list(np.asarray(rows).shape)}" for name, rows in plain.items())
    return SmokeResult(shown=shown, count=SMOKE_ROWS, unit="rows", seconds=seconds, curl=_predict_curl(url, card=card))


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.random(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _predict_curl(url: str, *, card: Mapping[str, Any]) -> str:
    """A row of zeros, where it is short enough to read; else the files to send."""
    rows = {name: np.zeros((1, *form["shape"][1:]), form["dtype"]) for name, form in card["inputs"].items()}
    if sum(row.size for row in rows.values()) <= CURL_NUMBERS:
        # 0 is as good as 0.0 to the server, and shorter.
        zeros = {name: (row if row.dtype == bool else row.astype(int)).tolist() for name, row in rows.items()}
        return _curl(url, "predict", {"inputs": zeros})
    return f"curl {url}/v1/predict -H 'Content-Type: application/x-npz' --data-binary @inputs.npz -o outputs.npz"


def _curl(url: str, endpoint: str, fields: Mapping[str, Any]) -> str:
    body = shlex.quote(json.dumps(fields, separators=(",", ":") if endpoint == "predict" else None))
    return f"curl {url}/v1/{endpoint} -H 'Content-Type: application/json' -d {body}"


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


def _post(url: str, endpoint: str, fields: Mapping[str, Any], *, timeout_seconds: float) -> bytes:
    body = json.dumps(fields).encode()
    return _send(url, endpoint, body, media_type="application/json", timeout_seconds=timeout_seconds)


def _get(url: str, *, timeout_seconds: float) -> bytes:
    return _answer(urllib.request.Request(url), timeout_seconds=timeout_seconds)


def _send(url: str, endpoint: str, body: bytes, *, media_type: str, timeout_seconds: float) -> bytes:
    headers = {"Content-Type": media_type}
    request = urllib.request.Request(f"{url}/v1/{endpoint}", data=body, headers=headers)
    return _answer(request, timeout_seconds=timeout_seconds)


def _answer(request: urllib.request.Request, *, timeout_seconds: float) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise StageError(
            f"{request.full_url}: the smoke request got status {error.code}: {error.read()[:2000].decode()}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise StageError(f"{request.full_url}: the smoke request failed: {error}") from error
