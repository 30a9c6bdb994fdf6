"""The header of one safetensors file.

Owns its parsing and checking. Knows nothing of other files. The one decision: a header is believed only when its
entries fill the file exactly, so a truncated or swapped file is refused before anything is read.

Layout of a file: 8 bytes little-endian header length, a JSON header, then the tensors' bytes back to back
(github.com/huggingface/safetensors, README, "Format"). A file that one rank of torch.distributed.checkpoint wrote has
in its metadata, under DCP_SHARDING_INFO, where each of its tensors starts in the whole one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.operations import Shape
from pipeline.models.json_file import parse_json, whole_number

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation; a longer one is damage or an attack."""
SHARDING_KEY = "DCP_SHARDING_INFO"

_DTYPES = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F4": ("float4_e2m1fn", 4),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}
"""Name and bits of every dtype of the format; a report must also be able to name those that are never read."""
STORED_NAMES: Mapping[str, str] = {name: stored for stored, (name, _) in _DTYPES.items()}
"""The format's own name of each dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """One entry of a header."""

    path: Path
    offset: int
    """Of its first byte in the file."""
    num_bytes: int
    dtype: str
    starts: Shape
    """Index of its first element in the whole tensor; zeros where the file holds the whole tensor."""
    sizes: Shape
    is_placed: bool
    """True where the file itself says where the part starts."""


def read_header(path: Path) -> dict[str, StoredPart]:
    """The entries of a file by tensor name.

    Raises:
        ValueError: the header does not describe this file exactly.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"not a safetensors file: header of {length} bytes in a file of {size}")
        entries = parse_json(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    starts = _starts(entries.pop("__metadata__", None))
    found = {}
    for name, entry in entries.items():
        if not name.isprintable():
            raise ValueError(f"{name!r} is no name of a tensor")
        found[name] = _entry(name, entry, path=path, data=8 + length, starts=starts)
    end = 8 + length
    for name, part in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if part.offset != end:
            raise ValueError(f"{name} starts at byte {part.offset}, the tensor before it ends at {end}")
        end = part.offset + part.num_bytes
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise ValueError(f"{what}: {size} bytes, the header describes {end}")
    return found


def _starts(metadata: Any) -> Mapping[str, Any] | None:
    """What the metadata say of each tensor's place, or None where the file is no rank's part."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is no JSON object of texts")
    if SHARDING_KEY not in metadata:
        return None
    try:
        return {
            str(name): tuple(whole_number(start) for start in place["saved_offsets"])
            for name, place in parse_json(metadata[SHARDING_KEY].encode()).items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its {SHARDING_KEY} is malformed ({type(error).__name__}: {error})") from None


def _entry(name: str, entry: Any, *, path: Path, data: int, starts: Mapping[str, Any] | None) -> StoredPart:
    try:
        dtype, bits = _DTYPES[entry["dtype"]]
        sizes = tuple(whole_number(size) for size in entry["shape"])
        begin, end = (whole_number(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: malformed header entry {str(entry)[:200]} ({type(error).__name__}: {error})"
        ) from None
    if (end - begin) * 8 != math.prod(sizes) * bits:
        raise ValueError(f"{name}: shape {sizes} {dtype} does not fill the bytes {begin} to {end}")
    if starts is not None and len(starts.get(name, ())) != len(sizes):
        raise ValueError(f"{name}: {SHARDING_KEY} gives no place with {len(sizes)} axes")
    return StoredPart(
        path=path,
        offset=data + begin,
        num_bytes=end - begin,
        dtype=dtype,
        starts=tuple(starts.get(name, ())) if starts is not None else (0,) * len(sizes),
        sizes=sizes,
        is_placed=starts is not None,
    )
