"""What a reader offers, whatever the format: headers first, tensors one by one.

Owns the seam between file formats and the converter. Knows nothing of any format. The one decision: everything needed
to plan a conversion is in the headers, so a checkpoint that does not fit is refused before its weights are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from converters.operations import Array, Shape

CONFIG_FILE = "config.json"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files beside the weights that go with the model unchanged, where they exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint, unread."""

    name: str
    """As stored, wrapper prefixes included."""
    shape: Shape
    dtype: str
    """`float32`, `bfloat16`, ...; any other name is passed on so that an error can say it."""


class CheckpointSource(Protocol):
    """A checkpoint that is open for reading."""

    @property
    def format(self) -> str:
        """Name of the format, for the manifest."""
        ...

    @property
    def directory(self) -> Path:
        """Where `config.json` and the tokenizer lie."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every model tensor by its stored name, in the order in which reading is cheapest."""
        ...

    def read(self, name: str) -> Array:
        """The tensor `name` as a C-contiguous array of exactly its header's shape and dtype.

        Raises:
            CheckpointError: a file is missing, truncated or altered; names it.
        """
        ...
