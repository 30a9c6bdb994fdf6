"""Two answers to one request, held against each other.

Owns what equal means for each endpoint. Pure; knows nothing of HTTP beyond the two bodies. The one decision: only what
both models had to compute the same way is compared: greedy texts letter by letter, embeddings by their cosine,
predictions by their largest difference; a sampled text says nothing.
"""

import base64
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMBEDDINGS_PATH = "/v1/embeddings"
PREDICT_PATH = "/v1/predict"
_EVENT = "data: "
_ZIP, _NPY = b"PK", b"\x93NUMPY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was found; all None where the answers cannot be compared."""

    is_equal: bool | None = None
    cosines: Sequence[float] = ()
    max_abs_error: float | None = None

    @property
    def is_comparable(self) -> bool:
        """True where something was compared."""
        return self.is_equal is not None or bool(self.cosines) or self.max_abs_error is not None


def compare(path: str, *, asked: bytes, champion: bytes, challenger: bytes) -> Comparison:
    """Compare two whole bodies of status 200.

    Args:
        path: of the request, from `/v1` on.
        asked: the request's body.
        champion: its answer's body.
        challenger: likewise.
    """
    try:
        if path == EMBEDDINGS_PATH:
            return _compare_embeddings(_embeddings(champion), _embeddings(challenger))
        if path == PREDICT_PATH:
            return _compare_arrays(_arrays(champion), _arrays(challenger))
        if not is_greedy(asked):
            return Comparison()
        return Comparison(is_equal=texts(champion) == texts(challenger))
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        # One of them is not what this endpoint answers; that is a difference, not a reason to stop.
        return Comparison(is_equal=False)


def is_greedy(asked: bytes) -> bool:
    """True where a completion was asked for without chance.

    Raises:
        ValueError: the body is no JSON.
    """
    fields = json.loads(asked)
    return isinstance(fields, dict) and (fields.get("temperature") == 0 or fields.get("top_k") == 1)


def texts(body: bytes) -> dict[int, str]:
    """The text of each choice, plain or streamed, with its tool calls.

    Raises:
        ValueError: it is neither.
        KeyError: likewise.
    """
    if body.startswith(_EVENT.encode()):
        lines = [line.removeprefix(_EVENT) for line in body.decode().splitlines() if line.startswith(_EVENT)]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
    else:
        parts = [json.loads(body)]
    found: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            index = int(choice.get("index", 0))
            found[index] = found.get(index, "") + _said(choice)
    return found


def _said(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message", choice.get("delta")) or {}
    calls = message.get("tool_calls") or ()
    functions = [call.get("function") or {} for call in calls]
    # Their ids are drawn at random.
    called = "".join(f"{function.get('name') or ''}{function.get('arguments') or ''}" for function in functions)
    return str(message.get("content") or "") + called


def _embeddings(body: bytes) -> list[NDArray[Any]]:
    vectors = [item["embedding"] for item in json.loads(body)["data"]]
    return [
        np.frombuffer(base64.b64decode(vector), "<f4").astype(np.float64)
        if isinstance(vector, str)
        else np.asarray(vector, np.float64)
        for vector in vectors
    ]


def _compare_embeddings(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> Comparison:
    if [vector.shape for vector in ours] != [vector.shape for vector in theirs]:
        return Comparison(is_equal=False)
    return Comparison(cosines=[_cosine(one, other) for one, other in zip(ours, theirs, strict=True)])


def _cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0 else 0.0


def _arrays(body: bytes) -> dict[str, NDArray[Any]]:
    if body.startswith(_NPY):
        return {"": np.load(io.BytesIO(body), allow_pickle=False)}
    if body.startswith(_ZIP):
        with np.load(io.BytesIO(body), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    return {name: np.asarray(rows) for name, rows in json.loads(body)["outputs"].items()}


def _compare_arrays(ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]) -> Comparison:
    shapes = [{name: array.shape for name, array in arrays.items()} for arrays in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return Comparison(is_equal=False)
    errors = [
        float(np.max(np.abs(ours[name].astype(np.float64) - theirs[name].astype(np.float64)), initial=0.0))
        for name in ours
    ]
    # A number that is not one differs from everything.
    return Comparison(max_abs_error=float("inf") if any(np.isnan(errors)) else max(errors, default=0.0))
