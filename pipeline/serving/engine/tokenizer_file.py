"""`tokenizer.json` of a model directory, and the files beside it.

Owns their reading and the check against the vocabulary. Knows nothing of requests.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.errors import ArtifactError
from pipeline.models.json_file import read_json

TOKENIZER_FILE = "tokenizer.json"
_HINT = "convert the model again, or put the tokenizer it was trained with beside it"


def read_tokenizer(directory: Path, *, num_tokens: int) -> Tokenizer:
    """`tokenizer.json` of a model directory, without padding and truncation.

    Raises:
        ArtifactError: it is missing or unreadable, or gives tokens that the model does not have.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a model directory has its tokenizer", hint=_HINT)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file
        raise ArtifactError(f"{path}: cannot be read as a tokenizer: {error}", hint=_HINT) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= num_tokens:
        raise ArtifactError(
            f"{path}: gives tokens up to {highest}, but the model's vocabulary has {num_tokens}",
            hint="the tokenizer belongs to another model",
        )
    return tokenizer


def read_object(path: Path) -> dict[str, Any]:
    """Of a JSON file beside the tokenizer; empty where there is none.

    Raises:
        ArtifactError: it cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: cannot be read: {error}", hint=_HINT) from error
    if not isinstance(found, dict):
        raise ArtifactError(f"{path}: must be a JSON object, found {type(found).__name__}", hint=_HINT)
    return found
