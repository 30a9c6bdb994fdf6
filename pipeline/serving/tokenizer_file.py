"""`tokenizer.json` of a model directory.

Owns its reading and the check against the vocabulary. Knows nothing of requests.
"""

from pathlib import Path

from tokenizers import Tokenizer

from pipeline.errors import ArtifactError

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(directory: Path, *, num_tokens: int) -> Tokenizer:
    """`tokenizer.json` of a model directory, without padding and truncation.

    Raises:
        ArtifactError: it is missing or unreadable, or gives tokens that the model does not have.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a model directory has its tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for whatever is wrong with the file
        raise ArtifactError(f"{path}: cannot be read as a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= num_tokens:
        raise ArtifactError(
            f"{path}: gives tokens up to {highest}, but the model's vocabulary has {num_tokens}",
            hint="the tokenizer belongs to another model",
        )
    return tokenizer
