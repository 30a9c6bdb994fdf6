"""Documents to packed token shards: the whole work of `data.text`, without the stage around it.

Owns the layout of a dataset directory (`train-00000.npy`, `validation-00000.npy`, `tokenizer.json`, `manifest.json`).
Knows nothing of stages or trackers. The one decision: a row holds T + 1 tokens and overlaps the next row by one, so
every token of the stream is a target exactly once and a row is a training example by itself.

Shapes: T tokens in a training row; shards are [rows, T + 1].
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, ShardEntry, SplitEntry
from pipeline.data.shard_file import write_shard
from pipeline.data.split import Split
from pipeline.data.tokenizer import END_OF_TEXT, PADDING, encode, special_id, train_tokenizer
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
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Train the tokenizer on the train documents, encode, pack and write everything into `directory`.

    Args:
        split: documents, in the order they are packed.
        directory: exists and is empty.
        plan: sizes.
        source: facts about where the text came from; kept in the manifest.
        progress: told what is being done.

    Raises:
        ParameterError: a split is too short for one row.
    """
    progress("training the tokenizer")
    tokenizer = train_tokenizer(split.train, vocabulary_size=plan.vocabulary_size)
    tokenizer.save(str(directory / TOKENIZER_NAME))
    vocabulary_size = tokenizer.get_vocab_size()
    dtype = np.dtype(np.uint16 if vocabulary_size <= _UINT16_TOKENS else np.uint32)
    splits: dict[str, SplitEntry] = {}
    for name, documents in (("train", split.train), ("validation", split.validation)):
        progress(f"packing {name}")
        stream = np.concatenate([ids.astype(dtype) for ids in encode(tokenizer, documents)])
        rows = pack(stream, sequence_length=plan.sequence_length, split=name)
        shards = _write_shards(rows, directory, prefix=name, rows_per_shard=_rows_per_shard(plan))
        splits[name] = SplitEntry(
            num_documents=len(documents),
            num_bytes=sum(len(document.text.encode()) for document in documents),
            num_tokens=len(stream),
            num_rows=len(rows),
            shards=tuple(shards),
        )
    manifest = Manifest(
        sequence_length=plan.sequence_length,
        vocabulary_size=vocabulary_size,
        eos_token_id=special_id(tokenizer, END_OF_TEXT),
        pad_token_id=special_id(tokenizer, PADDING),
        dtype=dtype.name,
        seed=plan.seed,
        tokenizer_sha256=sha256_of(directory / TOKENIZER_NAME),
        splits=splits,
        source=dict(source),
    )
    (directory / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n")
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


def _rows_per_shard(plan: PackingPlan) -> int:
    return max(1, plan.shard_tokens // plan.sequence_length)


def _write_shards(rows: npt.NDArray[Any], directory: Path, *, prefix: str, rows_per_shard: int) -> Iterable[ShardEntry]:
    for number, first in enumerate(range(0, len(rows), rows_per_shard)):
        yield write_shard(directory / f"{prefix}-{number:05d}.npy", rows[first : first + rows_per_shard])
