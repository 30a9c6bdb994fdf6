"""One document: the unit that is split, shuffled and never cut in half between train and validation.

Owns the value that sources give and packing takes. Knows nothing of files or tokens. The one decision: a document has
a name that is the same on every machine, because its place and its split are derived from that name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text and its name: a path relative to the source, with the line number for a line of a JSON Lines file."""

    name: str
    text: str
