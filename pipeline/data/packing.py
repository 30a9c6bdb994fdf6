"""Documents to packed token shards: the whole work of `data.text`, without the stage around it.

Owns the layout of a dataset directory (`train-00000.npy`, `train-00000.documents.npy`, the same for `validation`,
`tokenizer.json`, `manifest.json`). Knows nothing of stages or trackers. The one decision: a row holds T + 1 tokens and
overlaps the next row by one, so every token of the stream is a target exactly once and a row is a training example by
itself.

Shapes: T tokens in a training row; shards are [rows, T + 1].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.manifest import TOKENIZER_NAME, Manifest, ShardEntry, SplitEntry
from pipeline.data.shard_file import write_shard
from pipeline.data.split import Split
from pipeline.data.text_tokenizer import TextTokenizer, trained_tokenizer
from pipeline.data.tokenizer import encode
from pipeline.errors import ParameterError

_UINT16_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """What decides the bytes of a dataset, beside the documents."""

    vocabulary_size: int
    sequence_length: int
    shard_tokens: int
    seed: int


def write_dataset(
    split: Split,
    directory: Path,
    *,
    plan: PackingPlan,
    source: Mapping[str, Any],
    tokenizer: TextTokenizer | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Encode, pack and write everything into `directory`.

    Args:
        split: documents, in the order they are packed.
        directory: exists and is empty.
        plan: sizes.
        source: facts about where the text came from; kept in the manifest.
        tokenizer: a model's own; where it is None, one is trained on the train documents.
        progress: told what is being done.

    Raises:
        ParameterError: a split is too short for one row.
    """
    if tokenizer is None:
        progress("training the tokenizer")
        tokenizer = trained_tokenizer(split.train, vocabulary_size=plan.vocabulary_size)
    (directory / TOKENIZER_NAME).write_bytes(tokenizer.content)
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= _UINT16_TOKENS else np.uint32)
    splits: dict[str, SplitEntry] = {}
    for name, documents in (("train", split.train), ("validation", split.validation)):
        progress(f"packing {name}")
        encoded = [ids.astype(dtype) for ids in encode(tokenizer.tokenizer, documents, end=tokenizer.eos_token_id)]
        starts = np.cumsum([0, *map(len, encoded[:-1])], dtype=np.int64)
        stream = np.concatenate(encoded)
        rows = pack(stream, sequence_length=plan.sequence_length, split=name)
        shards, beginnings = _write_shards(rows, starts, directory, prefix=name, plan=plan)
        splits[name] = SplitEntry(
            num_documents=len(documents),
            num_bytes=sum(len(document.text.encode()) for document in documents),
            num_tokens=len(stream),
            num_rows=len(rows),
            shards=shards,
            documents=beginnings,
        )
    manifest = Manifest(
        sequence_length=plan.sequence_length,
        vocabulary_size=tokenizer.vocabulary_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype.name,
        seed=plan.seed,
        tokenizer_sha256=sha256_of(directory / TOKENIZER_NAME),
        splits=splits,
        source=dict(source),
    )
    manifest.write(directory)
    return manifest


def pack(stream: npt.NDArray[Any], *, sequence_length: int, split: str) -> npt.NDArray[Any]:
    """Cut a token stream into rows [num_rows, T + 1] that overlap by one token; the tail that fills no row is dropped.

    Raises:
        ParameterError: the stream fills no row.
    """
    num_rows = (len(stream) - 1) // sequence_length
    if num_rows < 1:
        raise ParameterError(
            f"the {split} split has {len(stream)} tokens, fewer than one row of sequence_length {sequence_length} + 1",
            hint="lower `sequence_length`, give more text, or raise `validation_fraction`",
        )
    return np.lib.stride_tricks.sliding_window_view(stream, sequence_length + 1)[::sequence_length][:num_rows]


def _write_shards(
    rows: npt.NDArray[Any], starts: npt.NDArray[np.int64], directory: Path, *, prefix: str, plan: PackingPlan
) -> tuple[tuple[ShardEntry, ...], tuple[ShardEntry, ...]]:
    """Write rows [N, T + 1], and where documents begin; `starts` counts tokens of the stream."""
    length, rows_per_shard = plan.sequence_length, max(1, plan.shard_tokens // plan.sequence_length)
    shards, documents = [], []
    for number, first in enumerate(range(0, len(rows), rows_per_shard)):
        part = rows[first : first + rows_per_shard]
        # The last token of a shard is the first of the next one, and so is a document that begins there.
        inside = starts[
            np.searchsorted(starts, first * length) : np.searchsorted(starts, (first + len(part)) * length + 1)
        ]
        shards.append(write_shard(directory / f"{prefix}-{number:05d}.npy", part))
        documents.append(write_shard(directory / f"{prefix}-{number:05d}.documents.npy", inside - first * length))
    return tuple(shards), tuple(documents)
