"""What a packed dataset says of itself.

Owns the shape of `manifest.json` and its reading. Knows nothing of how it was made. The one decision: every file of
the dataset is listed with its size and sha256, so a damaged dataset is named file by file and never trained on.
Schema 2 added where documents begin, which the ids alone do not say: text may hold the end-of-text token itself.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.manifest import sha256_of
from pipeline.errors import ArtifactError

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
SCHEMA = 2
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
    documents: tuple[ShardEntry, ...]
    """For each shard, int64 [documents]: where documents begin, in tokens after the first of the shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """Of a dataset whose shards stay where they are."""

    location: str
    """fsspec URL of the directory that holds them."""
    shuffled_shards: int
    """Shards whose rows are mixed with each other; the order goes through that many at a time."""


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
    streaming: Streaming | None = None
    """None where the shards lie beside this manifest."""

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read `manifest.json` of a dataset directory.

        Raises:
            ArtifactError: it is missing, not JSON, or of another schema.
        """
        return cls.parse(read_raw_manifest(directory), path=str(directory / MANIFEST_NAME))

    @classmethod
    def parse(cls, raw: dict[str, Any], *, path: str) -> "Manifest":
        """Take the JSON of a `manifest.json` that was read from `path`.

        Raises:
            ArtifactError: it is damaged, of another schema or of another kind of dataset.
        """
        if "kind" in raw:
            raise ArtifactError(
                f"{path}: a dataset of {raw['kind']}, and rows of tokens are wanted",
                hint="use the output of `data.text` here",
            )
        if raw.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{path}: dataset schema {raw.get('schema')!r}, this version reads {SCHEMA}",
                hint="run the data stage again with this version",
            )
        try:
            splits = {
                name: SplitEntry(
                    **{
                        **entry,
                        "shards": tuple(ShardEntry(**shard) for shard in entry["shards"]),
                        "documents": tuple(ShardEntry(**shard) for shard in entry["documents"]),
                    }
                )
                for name, entry in raw.pop("splits").items()
            }
            streaming = raw.pop("streaming", None)
            return cls(splits=splits, streaming=None if streaming is None else Streaming(**streaming), **raw)
        except (TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged ({error})", hint=AGAIN) from error


def manifest_digest(directory: Path) -> str:
    """sha256 of `manifest.json`, which holds that of every other file; hexadecimal."""
    return sha256_of(directory / MANIFEST_NAME)


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
