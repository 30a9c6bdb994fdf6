"""The byte-level BPE tokenizer of a text dataset.

Owns training, the two special tokens and encoding. Knows nothing of shards. The one decision: every byte is in the
alphabet, so any text can be encoded and there is no unknown token.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data.document import Document
from pipeline.errors import ArtifactError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
_ENCODED_TOGETHER = 64
"""Documents in one call of the tokenizer, which spreads them over the cores."""


def train_tokenizer(documents: Sequence[Document], *, vocabulary_size: int) -> Tokenizer:
    """A tokenizer with at most `vocabulary_size` tokens (fewer where the text has no more pairs to merge)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer=trainer, length=len(documents))
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of one of the two special tokens.

    Raises:
        ArtifactError: the tokenizer is not one that `train_tokenizer` made.
    """
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise ArtifactError(f"the tokenizer has no token {token!r}", hint="run the data stage again")
    return number


def encode(tokenizer: Tokenizer, documents: Sequence[Document], *, end: int) -> Iterator[npt.NDArray[np.int64]]:
    """Token ids of each document, int64 [tokens], the last one `end`: once, where its text ends in that token too."""
    for first in range(0, len(documents), _ENCODED_TOGETHER):
        texts = [document.text for document in documents[first : first + _ENCODED_TOGETHER]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            yield np.asarray(ids if ids and ids[-1] == end else [*ids, end], dtype=np.int64)
