"""The tokenizer inside a GGUF file, as files that transformers loads.

Owns the call of transformers' own conversion. Knows nothing of weights. The one decision: what transformers cannot
make a tokenizer of is left out, and the conversion says that the model has none; a tokenizer that is almost right is
worse.
"""

import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from converters.source import COMPANION_FILES


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """`tokenizer.json` and its companions, made from the vocabulary of the file; empty where that cannot be done."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # AutoTokenizer gives the same bytes, but reads the whole metadata twice more for a config (16 s, and 1.3 here).
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except BaseException as error:
        # For a vocabulary without sense, tokenizers raises Exception itself or panics, which is no Exception.
        is_of_vocabulary = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_of_vocabulary or isinstance(error, ImportError | MemoryError):
            raise
        return {}
    finally:
        logging.set_verbosity(verbosity)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        return {file.name: file.read_bytes() for file in Path(temporary).iterdir() if file.name in COMPANION_FILES}
