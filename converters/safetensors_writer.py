"""Safetensors files, written tensor by tensor.

Owns their layout on the way out: headers, shards, the index. Knows nothing of families or Flax. The one decision: the
headers are known before any number is, so each tensor is read, written and let go, and a model of any size goes through
the memory of its largest tensor.

Names and split are those of transformers' `save_pretrained`: `model.safetensors`, or
`model-00001-of-00003.safetensors` with `model.safetensors.index.json`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from converters.operations import Array
from converters.safetensors_header import STORED_NAMES
from converters.source import STORED_DTYPES, TensorHeader

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 50 * 10**9
"""What `save_pretrained` of transformers 5 splits at."""
_ALIGNMENT = 8
"""The format pads its header with spaces to a multiple of this."""

Read = Callable[[str], Array]
"""The tensor of a name, in its header's shape and dtype."""


def write_sharded(
    directory: Path,
    *,
    headers: Mapping[str, TensorHeader],
    read: Read,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, ...]:
    """Write the tensors into `directory`, as one file or as shards with an index.

    Args:
        directory: exists.
        headers: of every tensor by name; its dtype is the one written.
        read: called once a tensor, shard after shard.
        max_shard_bytes: a shard holds at least one tensor, and more as long as they fit.
        progress: told tensors done and tensors in all.

    Returns:
        The names of the files.

    Raises:
        OSError: the disk refuses.
        ValueError: a tensor is not as its header says.
    """
    shards = _shards(headers, max_shard_bytes)
    done = 0

    def counted(name: str) -> Array:
        nonlocal done
        array = read(name)
        done += 1
        if progress is not None:
            progress(done, len(headers))
        return array

    if len(shards) == 1:
        write_file(directory / WEIGHTS_FILE, headers=headers, read=counted)
        return (WEIGHTS_FILE,)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        write_file(directory / file, headers={name: headers[name] for name in names}, read=counted)
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(header.shape) for header in headers.values()),
            "total_size": sum(map(_num_bytes, headers.values())),
        },
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return (*files, INDEX_FILE)


def write_file(path: Path, *, headers: Mapping[str, TensorHeader], read: Read) -> None:
    """Write one safetensors file; see `write_sharded`."""
    # Wide numbers first, as the reference implementation does, so that every tensor is aligned to its own width.
    order = sorted(headers, key=lambda name: -STORED_DTYPES[headers[name].dtype].itemsize)
    with path.open("wb") as file:
        file.write(_header(order, headers))
        for name in order:
            array = read(name)
            header = headers[name]
            if (array.shape, array.dtype) != (header.shape, STORED_DTYPES[header.dtype]):
                raise ValueError(
                    f"{name}: announced as {header.shape} {header.dtype}, found {array.shape} {array.dtype}"
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array


def _header(order: Sequence[str], headers: Mapping[str, TensorHeader]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for name in order:
        begin, end = end, end + _num_bytes(headers[name])
        entries[name] = {
            "dtype": STORED_NAMES[headers[name].dtype],
            "shape": list(headers[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _shards(headers: Mapping[str, TensorHeader], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, header in headers.items():
        if shards[-1] and size + _num_bytes(header) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _num_bytes(header)
    return shards


def _num_bytes(header: TensorHeader) -> int:
    return math.prod(header.shape) * STORED_DTYPES[header.dtype].itemsize
