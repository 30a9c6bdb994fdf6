"""Which documents are kept, in which order, and which are held out.

Owns the seeded order and the split. Pure. The one decision: a document's split is a hash of its own name, so adding
documents to a corpus never moves another document between train and validation.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.data.document import Document
from pipeline.errors import ParameterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The documents of a dataset, in the order they are packed."""

    train: Sequence[Document]
    validation: Sequence[Document]


def choose(
    documents: Iterable[Document], *, seed: int, max_documents: int | None, max_bytes: int | None
) -> list[Document]:
    """A seeded order of the documents, cut after `max_documents` or before the document that passes `max_bytes`.

    Always keeps two documents, because a split needs them.
    """
    kept: list[Document] = []
    num_bytes = 0
    for document in sorted(documents, key=lambda item: _unit(item.name, salt=f"order:{seed}")):
        num_bytes += len(document.text.encode())
        too_many = max_documents is not None and len(kept) >= max_documents
        too_large = max_bytes is not None and num_bytes > max_bytes
        if (too_many or too_large) and len(kept) >= 2:
            break
        kept.append(document)
    return kept


def split(documents: Sequence[Document], *, seed: int, validation_fraction: float) -> Split:
    """Hold out about `validation_fraction` of the documents, at least one and never all.

    Raises:
        ParameterError: there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ParameterError(
            f"a split by document needs at least two documents, found {len(documents)}",
            hint="name a directory or a glob, or JSON Lines with `json_field`, where each line is a document",
        )
    place = {document.name: _unit(document.name, salt=f"split:{seed}") for document in documents}
    by_place = sorted(place, key=lambda name: place[name])
    held_out = {name for name in by_place if place[name] < validation_fraction}
    held_out = (held_out | {by_place[0]}) - {by_place[-1]}
    return Split(
        train=[document for document in documents if document.name not in held_out],
        validation=[document for document in documents if document.name in held_out],
    )


def _unit(name: str, *, salt: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{name}".encode()).digest()[:8]) / 2**64
