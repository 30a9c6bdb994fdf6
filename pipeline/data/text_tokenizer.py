"""The tokenizer of a text dataset: trained on its text, or the one of a model that exists.

Owns which it is, and which token ends a document. Knows nothing of shards. The one decision: with a model's own
tokenizer a document ends in what that model's files call the end of a text, for that is where it stops generating.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.data.document import Document
from pipeline.data.manifest import TOKENIZER_NAME
from pipeline.data.tokenizer import END_OF_TEXT, PADDING, special_id, train_tokenizer
from pipeline.errors import ParameterError

_CONFIGS = ("tokenizer_config.json", "config.json")
"""Where a model says which token ends a text, in the order of asking; the first by name, the second by id."""
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names of the end of a text where nothing says it."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer, and what a dataset says of it."""

    tokenizer: Tokenizer
    content: bytes
    """Of `tokenizer.json`."""
    eos_token_id: int
    """Ends each document."""
    pad_token_id: int

    @property
    def vocabulary_size(self) -> int:
        """Every id is below this."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def trained_tokenizer(documents: Sequence[Document], *, vocabulary_size: int) -> TextTokenizer:
    """A tokenizer of the documents' own."""
    made = train_tokenizer(documents, vocabulary_size=vocabulary_size)
    return TextTokenizer(
        tokenizer=made,
        content=made.to_str(pretty=True).encode(),
        eos_token_id=special_id(made, END_OF_TEXT),
        pad_token_id=special_id(made, PADDING),
    )


def read_tokenizer(place: Path) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json`, or of a model's directory that holds one.

    Raises:
        ParameterError: there is none, it cannot be read, or nothing says which token ends a text.
    """
    file = place / TOKENIZER_NAME if place.is_dir() else place
    try:
        content = file.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode())
    except OSError as error:
        found = sorted(path.name for path in place.iterdir())[:10] if place.is_dir() else None
        raise ParameterError(
            f"tokenizer {file}: cannot be read ({error.strerror})" + (f"; {place} holds {found}" if found else ""),
            hint="name a tokenizer.json, or a model's directory that holds one",
        ) from error
    except Exception as error:  # what the library raises has no class of its own
        raise ParameterError(
            f"tokenizer {file}: not a tokenizer.json ({error})",
            hint="save it with the tokenizers library, or with save_pretrained of transformers",
        ) from error
    # Lengths are this dataset's business.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = _end_of_text(tokenizer, file)
    pad = tokenizer.token_to_id(PADDING)
    return TextTokenizer(
        tokenizer=tokenizer, content=content, eos_token_id=end, pad_token_id=end if pad is None else pad
    )


def _end_of_text(tokenizer: Tokenizer, file: Path) -> int:
    named, numbered = (_read_object(file.parent / name) for name in _CONFIGS)
    name = named.get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    by_name = tokenizer.token_to_id(name) if isinstance(name, str) else None
    if by_name is not None:
        return int(by_name)
    number = numbered.get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and tokenizer.id_to_token(number) is not None:
        return number
    for name in _ENDS:
        if (known := tokenizer.token_to_id(name)) is not None:
            return int(known)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    raise ParameterError(
        f"tokenizer {file}: nothing says which token ends a text; its special tokens are {special or 'none'}",
        hint='put {"eos_token": "..."} into tokenizer_config.json beside it',
    )


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path}: cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}
