"""Texts in padded batches, as sentence-transformers makes them.

Owns tokenizing, sorting and padding for the peers of our embeddings. Knows no framework. The one decision: both peers
get the batches that sentence-transformers' `encode` would make: sorted by length, 32 rows, padded to the longest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

BATCH_ROWS = 32
"""sentence-transformers' default."""
MAX_TOKENS = 256
"""all-MiniLM-L6-v2's, by its `sentence_bert_config.json`."""
Forward = Callable[[Mapping[str, NDArray[np.int64]]], NDArray[np.float32]]
"""int64 `input_ids` and `attention_mask` [rows, tokens] to vectors [rows, size]."""


def make_embedder(directory: Path, *, forward: Forward) -> Callable[..., dict[str, Any]]:
    """`texts -> {seconds, first}`, from text to vectors; `directory` has `tokenizer.json`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()

    def embed(texts: Sequence[str]) -> dict[str, Any]:
        started = time.perf_counter()
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        made: dict[int, NDArray[np.float32]] = {}
        for start in range(0, len(order), BATCH_ROWS):
            rows = order[start : start + BATCH_ROWS]
            encoded = tokenizer.encode_batch([texts[row] for row in rows])
            arrays = {
                "input_ids": np.asarray([entry.ids for entry in encoded], np.int64),
                "attention_mask": np.asarray([entry.attention_mask for entry in encoded], np.int64),
            }
            made |= dict(zip(rows, forward(arrays), strict=True))
        return {"seconds": time.perf_counter() - started, "first": made[0][:4].tolist()}

    return embed


def mean_of_tokens(hidden: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """The mean of the real tokens of each row, to length 1; [rows, tokens, size] to [rows, size]."""
    weights = mask[..., None].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-9)
    return np.asarray(mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12), np.float32)
