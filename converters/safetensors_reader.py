"""Safetensors files, single or sharded with an index, read tensor by tensor.

Owns the parsing and checking of their headers. Knows nothing of families or Flax, and needs no framework: numpy reads
the bytes. The one decision: each tensor has the dtype of its own header entry, and a header is believed only when its
entries fill the file exactly, so a truncated or swapped file is refused before anything is read.

Layout of a file: 8 bytes little-endian header length, a JSON header, then the tensors' bytes back to back
(github.com/huggingface/safetensors, README, "Format").
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.operations import FLOAT_DTYPES, Array
from converters.source import BesideTheWeights, TensorHeader
from pipeline.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation; a longer one is damage or an attack."""

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name and size in bytes of every dtype of the format; a report must also be able to name those that are no weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    path: Path
    offset: int
    num_bytes: int


class SafetensorsSource(BesideTheWeights):
    """Open safetensors files; holds headers, no weights."""

    format = "safetensors"

    def __init__(self, *, directory: Path, headers: Mapping[str, TensorHeader], places: Mapping[str, _Place]) -> None:
        self.directory = directory
        self.headers = headers
        self._places = places

    @staticmethod
    def recognises(path: Path) -> bool:
        """True where `path` is a directory with safetensors files."""
        return path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob(f"*{INDEX_SUFFIX}")))

    @classmethod
    def open(cls, path: Path) -> "SafetensorsSource":
        """Read the headers of the files under `path`.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, a tensor is in two files, or several files have
                no index; names every file concerned.
        """
        files, wanted = _files(path)
        headers: dict[str, TensorHeader] = {}
        places: dict[str, _Place] = {}
        complaints = [f"{file}: missing" for file in files if not file.is_file()]
        for file in (file for file in files if file.is_file()):
            try:
                found = _read_header(file)
            except (ValueError, OSError) as error:
                complaints.append(f"{file}: {error}")
                continue
            complaints += [
                f"{name}: in {places[name].path.name} and in {file.name}" for name in found if name in places
            ]
            headers.update({name: header for name, (header, _) in found.items()})
            places.update({name: place for name, (_, place) in found.items()})
        if not complaints and wanted is not None:
            complaints += [f"{name}: the index names it, no file holds it" for name in wanted if name not in headers]
            complaints += [f"{name}: in {places[name].path.name}, not in the index" for name in headers.keys() - wanted]
        if complaints:
            raise CheckpointError(f"{path}: damaged checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
        order = sorted(headers, key=lambda name: (places[name].path, places[name].offset))
        return cls(directory=path, headers={name: headers[name] for name in order}, places=places)

    def read(self, name: str) -> Array:
        """The tensor as a new array.

        Raises:
            CheckpointError: the file became shorter since it was opened, or the dtype is no weight's.
        """
        header, place = self.headers[name], self._places[name]
        if header.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{place.path}: {name} has dtype {header.dtype}, which is not read as a weight")
        try:
            raw = np.fromfile(place.path, dtype=np.uint8, count=place.num_bytes, offset=place.offset)
        except OSError as error:
            raise CheckpointError(f"{place.path}: not readable: {error}") from error
        if raw.size != place.num_bytes:
            raise CheckpointError(f"{place.path}: {name} ends after {raw.size} of {place.num_bytes} bytes")
        return raw.view(FLOAT_DTYPES[header.dtype]).reshape(header.shape)


def _files(path: Path) -> tuple[list[Path], frozenset[str] | None]:
    """The files to open and, where an index says so, the tensors they must hold."""
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not indices:
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return files, None
        raise CheckpointError(
            f"{path}: {len(files)} safetensors files and no *{INDEX_SUFFIX} that says how they belong together",
            hint="keep one file, or add the index that `save_pretrained` writes",
        )
    if len(indices) > 1:
        raise CheckpointError(f"{path}: several indices: {', '.join(index.name for index in indices)}; keep one")
    try:
        weight_map = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
        files = sorted({path / str(file) for file in weight_map.values()})
        names = frozenset(map(str, weight_map))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{indices[0]}: not a safetensors index: {type(error).__name__}: {error}") from error
    outside = [str(file) for file in files if file.parent != path]
    if outside:
        raise CheckpointError(f"{indices[0]}: points outside of its directory: {', '.join(outside)}")
    return files, names


def _read_header(path: Path) -> dict[str, tuple[TensorHeader, _Place]]:
    """Tensor by name.

    Raises:
        ValueError: the header does not describe this file exactly.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"not a safetensors file: header of {length} bytes in a file of {size}")
        entries = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    metadata = entries.pop("__metadata__", None)
    if isinstance(metadata, dict) and "DCP_SHARDING_INFO" in metadata:
        raise ValueError("a per-rank file of sharded tensors; consolidate it with torch.distributed.checkpoint first")
    found = {name: _entry(name, entry, path=path, start=8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, (_, place) in sorted(found.items(), key=lambda item: (item[1][1].offset, item[1][1].num_bytes)):
        if place.offset != end:
            raise ValueError(f"{name} starts at byte {place.offset}, the tensor before it ends at {end}")
        end = place.offset + place.num_bytes
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise ValueError(f"{what}: {size} bytes, the header describes {end}")
    return found


def _entry(name: str, entry: Any, *, path: Path, start: int) -> tuple[TensorHeader, _Place]:
    try:
        dtype, width = _DTYPES[entry["dtype"]]
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: malformed header entry {entry!r} ({type(error).__name__}: {error})") from None
    if min((begin, end, *shape)) < 0 or end - begin != math.prod(shape) * width:
        raise ValueError(f"{name}: shape {shape} {dtype} does not fill the bytes {begin} to {end}")
    place = _Place(path=path, offset=start + begin, num_bytes=end - begin)
    return TensorHeader(name=name, shape=shape, dtype=dtype), place


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("its header names a tensor twice")
    return entries
