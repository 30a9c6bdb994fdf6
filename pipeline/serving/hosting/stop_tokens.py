"""The tokens that end a model's text.

Owns where they are looked for. The one decision: the files are united, because each is incomplete somewhere:
`config.json` names the end of a text, `generation_config.json` also that of a turn, `tokenizer_config.json` that of an
instructed model whose configs were left as they were.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.serving.engine.tokenizer_file import read_object
from pipeline.serving.http.chat_template import TOKENIZER_CONFIG, special_tokens

GENERATION_CONFIG = "generation_config.json"


def read_stop_ids(
    directory: Path, *, config: Mapping[str, Any], tokenizer: Tokenizer, num_tokens: int
) -> tuple[int, ...]:
    """End tokens of a model directory, those of `config` first.

    Raises:
        ArtifactError: a file cannot be read.
    """
    found = list(stop_ids_of(config))
    found += stop_ids_of(read_object(directory / GENERATION_CONFIG))
    end = special_tokens(read_object(directory / TOKENIZER_CONFIG)).get("eos_token")
    token = None if end is None else tokenizer.token_to_id(end)
    found += [] if token is None else [token]
    return tuple(dict.fromkeys(token for token in found if token < num_tokens))


def stop_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-text tokens of a transformers config: one, several or none."""
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))
