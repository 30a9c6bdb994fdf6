"""What a packed dataset says of itself.

Owns the shape of `manifest.json` and its reading. Knows nothing of how it was made. The one decision: every file of
the dataset is listed with its size and sha256, so a damaged dataset is named file by file and never trained on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
SCHEMA = 1
AGAIN = "run the data stage again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One `.npy` file of rows."""

    file: str
    num_rows: int
    num_bytes: int
    """Size of the file."""
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitEntry:
    """`train` or `validation`."""

    num_documents: int
    num_bytes: int
    """UTF-8 bytes of text."""
    num_tokens: int
    """Tokens of the stream, ends of text included, before the tail that fills no row was dropped."""
    num_rows: int
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole of `manifest.json`."""

    sequence_length: int
    vocabulary_size: int
    eos_token_id: int
    pad_token_id: int
    dtype: str
    """Of the shards: `uint16` or `uint32`."""
    seed: int
    tokenizer_sha256: str
    splits: Mapping[str, SplitEntry]
    source: Mapping[str, Any]
    schema: int = SCHEMA

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read `manifest.json` of a dataset directory.

        Raises:
            ArtifactError: it is missing, not JSON, or of another schema.
        """
        path = directory / MANIFEST_NAME
        raw = read_raw_manifest(directory)
        if "kind" in raw:
            raise ArtifactError(
                f"{directory}: a dataset of {raw['kind']}, and rows of tokens are wanted",
                hint="use the output of `data.text` here",
            )
        if raw.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path}: dataset schema {raw.get('schema')!r}, this version reads {SCHEMA}",
                hint="run the data stage again with this version",
            )
        try:
            splits = {
                name: SplitEntry(**{**entry, "shards": tuple(ShardEntry(**shard) for shard in entry["shards"])})
                for name, entry in raw.pop("splits").items()
            }
            return cls(splits=splits, **raw)
        except (TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged ({error})", hint=AGAIN) from error


def read_raw_manifest(directory: Path) -> dict[str, Any]:
    """`manifest.json` of any dataset, as JSON.

    Raises:
        ArtifactError: it is missing or not a JSON object.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{directory}: no {MANIFEST_NAME}; this is not a dataset", hint=AGAIN) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint=AGAIN) from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: damaged (a JSON object is wanted, found {type(raw).__name__})", hint=AGAIN)
    return raw
