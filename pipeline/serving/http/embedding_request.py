"""The body of `/v1/embeddings`, read and judged.

Owns every rule about what a client may ask. Pure. The one decision: a text that is longer than the model reads is an
error, as it is with OpenAI; an embedding of a part would look like one of the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.serving.http.completion_request import Encoder
from pipeline.serving.json_body import Fields, is_tokens, shown

MAX_INPUTS = 2048
"""OpenAI's."""
READ = ("model", "input", "encoding_format", "dimensions")
_IGNORED = ("user",)
FORMATS = ("float", "base64")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingModel:
    """What the body is judged against."""

    name: str
    max_tokens: int
    """Of one text, special tokens included."""
    num_tokens: int
    """Size of the model's vocabulary."""
    size: int
    """Numbers in a vector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingRequest:
    """A body without faults."""

    texts: tuple[tuple[int, ...], ...]
    """Tokens of each."""
    is_base64: bool


def parse_embedding(fields: Mapping[str, Any], *, model: EmbeddingModel, encoder: Encoder) -> EmbeddingRequest:
    """Judge a body that names this model.

    Raises:
        Rejected: 400 with every complaint.
    """
    reader = Fields(fields)
    encoding_format = fields.get("encoding_format") or "float"
    if encoding_format not in FORMATS:
        reader.complain("encoding_format", f"must be one of {', '.join(FORMATS)}, found {shown(encoding_format)}")
    size = reader.integer("dimensions", default=model.size, low=1, high=2**31 - 1)
    if size != model.size:
        # Cutting a vector is only right for models that were trained for it, and nothing in a checkpoint says so.
        reader.complain("dimensions", f"this model's vectors have {model.size} numbers, and are not shortened")
    texts = _texts(reader, model=model, encoder=encoder)
    reader.refuse_unknown((*READ, *_IGNORED))
    reader.raise_complaints()
    return EmbeddingRequest(texts=texts, is_base64=encoding_format == "base64")


def _texts(reader: Fields, *, model: EmbeddingModel, encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    texts = []
    for index, item in enumerate(reader.texts("input", most=MAX_INPUTS, called="texts")):
        tokens = _tokens(item, encoder=encoder)
        problem = "must be a string or a list of tokens" if tokens is None else _problem(tokens, model)
        if problem:
            reader.complain("input", f"item {index} {problem}" + ("" if tokens else f", found {shown(item)}"))
        else:
            texts.append(tokens or ())
    return tuple(texts)


def _tokens(item: object, *, encoder: Encoder) -> tuple[int, ...] | None:
    if isinstance(item, str):
        return tuple(encoder.encode(item).ids) if item else ()
    return tuple(item) if isinstance(item, list) and is_tokens(item) else None


def _problem(tokens: tuple[int, ...], model: EmbeddingModel) -> str:
    if not tokens:
        return "is empty"
    if len(tokens) > model.max_tokens:
        return f"has {len(tokens)} tokens; the model reads {model.max_tokens}"
    outside = [token for token in tokens if not 0 <= token < model.num_tokens]
    return f"has token {outside[0]}; the model has 0 to {model.num_tokens - 1}" if outside else ""
